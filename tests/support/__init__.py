"""What several test modules share: waiting, proxies, servers, mounts, disks."""
