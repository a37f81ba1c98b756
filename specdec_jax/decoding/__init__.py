"""From the arguments of `generate` to its result: requests, the decode loop, streams, batching."""
