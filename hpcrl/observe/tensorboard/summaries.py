"""Encodes events for TensorBoard."""

# protoc's modules have their names only at run time.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import (
    HistogramProto,
    Summary,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.hparams.metadata import NULL_TENSOR
from tensorboard.plugins.text import metadata as text_plugin

from hpcrl.observe.metrics import Histogram


def scalars(points: Mapping[str, float]) -> list[Any]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]


def histogram(tag: str, shape: Histogram) -> Any:
    """Return one histogram; its sums are those of values in the middle of their bins."""
    bins = len(shape.counts)
    width = (shape.high - shape.low) / bins
    limits = [shape.low + width * (number + 1) for number in range(bins)]
    middles = [limit - width / 2 for limit in limits]
    proto = HistogramProto(
        min=shape.low,
        max=shape.high,
        num=sum(shape.counts),
        sum=sum(count * middle for count, middle in zip(shape.counts, middles, strict=True)),
        sum_squares=sum(count * middle**2 for count, middle in zip(shape.counts, middles, strict=True)),
        bucket_limit=limits,
        bucket=shape.counts,
    )
    return Summary.Value(tag=tag, histo=proto)


def text(tag: str, markdown: str) -> Any:
    metadata = text_plugin.create_summary_metadata(display_name="", description="")
    return _stored(tag, metadata, markdown.encode())


def picture(tag: str, png: bytes) -> Any:
    """Return one picture, from the content of its PNG file."""
    width, height = struct.unpack(">II", png[16:24])
    return Summary.Value(
        tag=tag, image=Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
    )


def layout(content: bytes) -> Any:
    return _stored(custom_scalar.CONFIG_SUMMARY_TAG, custom_scalar.create_summary_metadata(), content)


def marker(tag: str, metadata: Any) -> Any:
    """Return a summary with metadata alone."""
    return Summary.Value(tag=tag, metadata=metadata, tensor=NULL_TENSOR)


def _stored(tag: str, metadata: Any, content: bytes) -> Any:
    return Summary.Value(tag=tag, metadata=metadata, tensor=TensorProto(dtype=DT_STRING, string_val=[content]))
