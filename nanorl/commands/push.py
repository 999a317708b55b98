"""`nanorl push RUN OWNER/NAME`: uploads a run's trained model with its card to the hub.

    nanorl push runs/smollm2-seed0 me/my-agent --private
    nanorl push runs/lora me/my-adapter --adapter

Read the card, README.md in model-trained/, before: it is the page that everybody sees. It needs
the package huggingface_hub and a token (`hf auth login`, or HF_TOKEN).
"""

from __future__ import annotations

from pathlib import Path

import tyro


def push(
    run: tyro.conf.Positional[Path],
    repo: tyro.conf.Positional[str],
    /,
    *,
    adapter: bool = False,
    private: bool = False,
) -> None:
    """Upload a run's trained model, with its card, to the Hugging Face hub.

    Args:
        run: The run's folder.
        repo: The repository, OWNER/NAME; it is made if there is none.
        adapter: Upload the adapter (adapter-trained/) instead of the whole model.
        private: Make the repository private, if it is new.
    """
    from nanorl.run.cards.hub import HubUpload  # here: it imports torch

    upload = HubUpload.of_run(run, repo, is_adapter=adapter, is_private=private)
    print(f"uploading {upload.folder} ({upload.num_bytes / 1e6:.1f} MB) to {repo} ...", flush=True)
    print(f"done: {upload.send()}")
