"""The one home of HTTP: the parts that every server of this stack is put together from, and the
client that asks them.

listening.py      the socket and its address; who may be on the network without a key
connection.py     one connection: how many there may be, how long each may take (http_limits.py)
serving.py        a server as a program of its own, or as a task of a loop that does other work
api_key.py        keys: their files, the headers that carry them, how they are compared
callers.py        whether a request may be answered: its key, its page, its host
http_io.py        bodies within limits, event streams, hang-ups; strict_body.py tells their faults
api_error.py      errors that clients are told, those of wrong paths as well
page_headers.py   the headers of a page that runs its own files alone
scrape.py         metrics as Prometheus reads them
http_client.py    the client: one request over one connection, within limits

listening.py, api_key.py and http_client.py need no package, the others the extra `serve`. The
servers: nanoinfer/server, nanorl/serving (environments, training), the endpoint that records
episodes, viewer, monitor. The proxy that records HTTP (nanorl/envs/http_record) is of another kind:
it is asked for other hosts, and asks them at addresses that it has checked.
Left out: TLS (put a proxy in front).
"""
