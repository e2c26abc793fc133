"""Local interfaces of a running daemon: the control socket."""
