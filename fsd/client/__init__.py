"""Direct commands without a mount: calls, copies and `run` over HTTP. `http` is the transport under all."""
