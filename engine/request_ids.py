"""Unique request ids from callers' labels, which two callers may use at the same time."""

LABEL_LIMIT = 200


def unique_id(label: str, number: int) -> str:
    """The node's own name of the `number`-th request."""
    return f"{label[:LABEL_LIMIT]}-{number:x}"


def has_label(request_id: str, label: str) -> bool:
    """True if `unique_id` made `request_id` from `label`."""
    return request_id.rpartition("-")[0] == label[:LABEL_LIMIT]
