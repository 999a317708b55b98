"""A training service over HTTP that the official `tinker` client speaks to: a loop that knows only
that API trains with this stack. `python -m nanorl.serve_training --model FOLDER` starts it.

    service_app.py       routes, keys, errors
    service_requests.py  bodies in JSON; service_messages.py those in protobuf (protobuf.py encodes)
    service.py           the verbs: sessions, models, samplers
    futures.py           requests that are answered later: once each, in order
    trained_model.py     a model, its optimizer, one request at a time; service_losses.py its losses
    service_sampling.py  inference engines that serve snapshots of the weights
    checkpoints.py       tinker:// paths and the folders they stand for

Left out: images and audio, losses that the client uploads, Dimuon, billing, projects, publishing,
lists of runs and sessions.
"""
