"""How KV pages travel: out of an engine's pages into stores beyond them, and back, into the same engine or another.

`format` is what a page looks like on its way, `store` the interface that every place to put pages has, `courier` moves
them off the engine's loop, `tiers` decides what is worth moving. Another engine is a store, too: `page_server` offers
pages, `peer_store` fetches them, `peer_wire` is what the two say. Start at `tiers`.
"""
