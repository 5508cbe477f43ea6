"""How the bytes of KV pages come from another worker: one file each, behind one protocol."""
