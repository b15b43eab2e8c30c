"""HTTP: ASGI routes, the OpenAI shapes, SSE, and the native API."""
