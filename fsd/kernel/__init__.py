"""The FUSE daemon: pyfuse3, its scheduler, supervisor, stops and the control socket. It only translates."""
