"""One program over many hosts: an agent a host, formations of fresh processes, and who watches over them."""
