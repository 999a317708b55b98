"""The one home of HTTP: the parts that every server of this stack is put together from, and the
client that asks them.

listening.py      the socket, its address, and who may be on the network without a key
connection.py     one connection: how many there may be, how long each may take (http_limits.py)
serving.py        a server as a program of its own, and as a task of somebody else's event loop
api_key.py        keys: their files, and the headers that carry them
callers.py        whether a request may be answered: its key, its page, its host
http_io.py        bodies within limits, event streams, hang-ups; strict_body.py tells their faults
api_error.py      errors that clients are told
routes.py         handlers under their paths, whose errors are told
page_headers.py   the headers of a page that runs its own files alone
scrape.py         metrics as Prometheus reads them
http_client.py    the client: one request over one connection, within limits, without packages

The first five need no package, nor does the client; the others need the extra `serve`. The servers:
nanoinfer/server, nanorl/serving (environments, training), the recording endpoint, viewer, monitor.
Left out: TLS (put a proxy in front). The proxy that records HTTP (nanorl/envs/http_record) is no
such server: its clients ask it for other hosts.
"""
