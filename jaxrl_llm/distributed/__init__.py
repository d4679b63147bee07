"""The mesh, the sharding rules, the layout switch and several hosts."""
