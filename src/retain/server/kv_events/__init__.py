"""KV events: gateways are told which pages this replica has cached, in the format of vLLM's events."""
