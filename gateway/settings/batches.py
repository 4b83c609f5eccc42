"""Files and batches: how much runs at once, how much is taken, how long it is kept."""

from __future__ import annotations

from pydantic import Field

from gateway.settings.strict import Strict


class BatchSettings(Strict):
    """`/v1/files` and `/v1/batches`: requests that come in a file and are answered when there is room."""

    concurrency: int = Field(
        8, ge=0, le=10_000, description="Lines at once per gateway process; 0: this one takes batches, others run them."
    )
    max_requests: int = Field(50_000, ge=1, le=1_000_000, description="Lines of one batch.")
    max_unfinished: int = Field(100, ge=1, description="Batches of a project that have not ended.")
    max_file_bytes: int = Field(200 * 1024 * 1024, ge=1024, description="Of one uploaded file.")
    max_project_bytes: int = Field(
        4 * 1024**3, ge=1024, description="Of all files of a project; beyond that nothing more is uploaded."
    )
    keep_days: int = Field(30, ge=1, le=3650, description="How long files and ended batches are kept.")
