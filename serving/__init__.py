"""The inference pool: engines, replicas, routing by pinned version, and the token door between processes."""
