"""How a request reaches an engine: the wire protocol, the client, the worker that owns the policy."""
