"""Responses, whole and streamed. In: outputs of the engine. Out: JSON and server-sent events."""
