"""The device mesh, sharding rules, the layout switch, and several hosts."""
