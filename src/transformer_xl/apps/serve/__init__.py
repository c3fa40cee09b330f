"""A server of runs over HTTP: OpenAI's API, and sessions whose memory stays on the server (extra `serve`)."""
