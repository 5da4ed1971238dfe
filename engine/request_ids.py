"""How a node makes a caller's label unique: two callers may use the same one at the same time."""

LABEL_LIMIT = 200


def unique_id(label: str, number: int) -> str:
    """The node's own name of the `number`-th request."""
    return f"{label[:LABEL_LIMIT]}-{number:x}"


def has_label(request_id: str, label: str) -> bool:
    """Whether `unique_id` made `request_id` of `label`."""
    return request_id.rpartition("-")[0] == label[:LABEL_LIMIT]
