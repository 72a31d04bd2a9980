"""Side-by-side figures of fsd, a local disk and peers, of one run on one machine, by `scripts/bench`."""
