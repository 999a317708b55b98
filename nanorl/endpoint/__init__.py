"""Recording endpoints: agents that only know an API, trained on the tokens that the engine sampled.

    exchange.py   what a client asks and gets, in no dialect; the contract of a dialect
    dialects/     OpenAI's chat completions and Responses, Anthropic's Messages
    recording.py  the calls of one episode, joined by their tokens
    server.py     the HTTP server: a key for each episode

Imported only by runs whose agent is a program of its own.
"""
