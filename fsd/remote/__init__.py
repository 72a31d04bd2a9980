"""The server as a mount sees it: the hot routes behind `api.Remote`, over sockets of its own."""
