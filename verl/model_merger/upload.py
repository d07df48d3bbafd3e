"""Uploading a finished folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path


def upload(folder: Path, repository: str, private: bool) -> str:
    """Make the repository if it is not there and upload the folder; returns its address.

    The token is the one that ``hf auth login`` or ``HF_TOKEN`` gives.

    Raises:
        ValueError: the hub refuses or does not answer; the folder stays where it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo_id=repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(folder.expanduser()), repo_id=repository, repo_type="model")
    except Exception as error:  # the hub's client raises errors of its own and of its network library
        raise ValueError(
            f"--hf_upload_path {repository}: {type(error).__name__}: {str(error)[:300]}. The folder {folder} is "
            "complete; log in with `hf auth login` and upload it with `hf upload`"
        ) from error
    return str(address)
