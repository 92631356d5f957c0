"""The engine that every exported version ships: continuous batching over ranks."""
