"""Converts an image or a video to a model's inputs: its tensors, and its placeholder tokens. Without torch."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from hpcrl.config.import_path import imported
from hpcrl.config.sections.data import DataConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import check_files
from hpcrl.data.tokenizer import read_tokenizer
from hpcrl.data.vision.families import GRID, PIXELS, SECONDS, STATES, VisionFamily, family_of, placeholders
from hpcrl.data.vision.frames import FrameChoice, Shown, Video, frames_of
from hpcrl.data.vision.images import opened, size_of, state_in
from hpcrl.data.vision.video_processor import VideoProcessor
from hpcrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np

_KEPT = 64  # images that are not prepared again though nobody has them any more


@dataclass(frozen=True)
class Preparation:
    """Settings for the preparation of images and videos.

    Attributes:
        images: data.image_processor_kwargs.
        video_frames: of a video at most.
        video_pixels: of a frame at most; None: as the model's video processor bounds them.
    """

    images: Mapping[str, Any] = field(default_factory=dict)
    video_frames: int = DataConfig.video_frames
    video_pixels: int | None = None

    @classmethod
    def of(cls, data: DataConfig) -> Preparation:
        return cls(data.image_processor_kwargs, data.video_frames, data.video_pixels)


@dataclass(frozen=True, eq=False)
class SeenImage:
    """An image or a video as a model sees it.

    Attributes:
        tensors: PIXELS float32, [patches, numbers of a patch] where there is a GRID [1, 3] int64, or [1, 3, height, width]. SECONDS [1] float32
            of a video where the model counts in seconds. A robot's measurements, which stand among images, have STATES [1, numbers]
            float32 alone.
        token: the placeholder of its kind.
        ids: tokens that replace one placeholder of the template's text, with the text between frames.
        digest: of the tensors.
        source: the image itself, as of `image_text`, or the video.
        choice: which frames of a video it is; None: an image.
    """

    tensors: Mapping[str, np.ndarray]
    token: int
    ids: Sequence[int]
    digest: str
    source: Shown
    choice: FrameChoice | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the image or video."""
        return self.ids.count(self.token)


class Context(NamedTuple):
    """Tokens that a policy is shown, and the images and videos that the placeholders among them stand for, in their order."""

    token_ids: list[int]
    images: tuple[SeenImage, ...] = ()

    def followed_by(self, more: Context) -> Context:
        return Context(self.token_ids + more.token_ids, self.images + more.images)


class ImageReader:
    """Prepares images and videos for one model.

    Args:
        model: for errors, and its tokenizer.
        config: of transformers.
        processor: of images, of transformers.
        of_each: tokens of an image where each has the same number; None: those of its grid.
        videos: prepares videos; None: the model takes none.
        frames: of a video at most.
        states: returns a robot's state as the network has it, [1, numbers]; None: it is not shown.

    Attributes:
        never_said: placeholders that the policy may not say.
        states: returns a robot's state as the network has it, [1, numbers]; None: it is not shown.
    """

    def __init__(
        self,
        model: Pretrained,
        config: Any,
        processor: Any,
        of_each: int | None,
        videos: VideoProcessor | None,
        frames: int,
        states: Callable[[Sequence[float]], np.ndarray] | None = None,
    ) -> None:
        self._model, self._config, self._states = model, config, states
        self._processor, self._of_each, self._videos, self._frames = processor, of_each, videos, frames
        token: int | None = getattr(config, "image_token_id", None)
        self._token: int = config.image_token_index if token is None else token
        self.never_said = placeholders(config)
        self._known = WeakValueDictionary[Shown, SeenImage]()
        self._latest = deque[SeenImage](maxlen=_KEPT)

    @classmethod
    def of(
        cls,
        model: Pretrained,
        preparation: Preparation | None = None,
        states: Callable[[Sequence[float]], np.ndarray] | None = None,
    ) -> ImageReader | None:
        """Return the reader of a model; None: it has no images.

        Args:
            states: as of the class.

        Raises:
            DataError: its image processor cannot be loaded.
        """
        from transformers import AutoConfig

        import hpcrl.data.models.openvla  # noqa: F401  registers it with transformers

        wanted = preparation or Preparation()
        try:
            check_files(model.path, **model.at_revision)
            config: Any = AutoConfig.from_pretrained(model.path, trust_remote_code=False, **model.at_revision)
        except (OSError, ValueError):  # the model's load fails with a better message
            return None
        family = family_of(config)
        if family is None:
            return None
        try:
            processor = _processor(family, model, wanted.images)
            videos = family.videos and VideoProcessor.of(model, processor, family.videos, wanted.video_pixels)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"the image processor of {model} cannot be loaded: {' '.join(str(error).split())}"
            ) from error
        of_each = None if family.grid else _tokens_of_each(config, processor)
        return cls(model, config, processor, of_each, videos, wanted.video_frames, states)

    def ids(self, shown: Shown) -> list[int]:
        """Return the tokens that take the place of one placeholder, as of SeenImage; of an image or a video only the header is read."""
        if isinstance(shown, Video):
            return self._ids_of_video(self._choice(shown))
        return [self._token] * (1 if state_in(shown) is not None else self._tokens_of_image(shown))

    def _tokens_of_image(self, image: str) -> int:
        height, width = size_of(image)
        if self._of_each is not None:
            return self._of_each
        try:
            return self._processor.get_number_of_image_patches(height, width, {}) // self._processor.merge_size**2
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels: {error}") from error

    def _choice(self, video: Video) -> FrameChoice:
        if self._videos is None:
            raise DataError(f"{self._model} takes no videos; show their frames as images")
        return FrameChoice.of(video, self._frames)

    def _ids_of_video(self, choice: FrameChoice) -> list[int]:
        """Return the placeholders of a video; where the prompt has timestamps, for each pair of frames as Qwen3-VL's processor writes them."""
        assert self._videos is not None, "that videos are taken was seen when their frames were chosen"
        token, count = self._config.video_token_id, self._videos.tokens(choice)
        moments = self._videos.moments(choice)
        if self._videos.videos != "timestamps":
            return [token] * count * len(moments)
        start, end = self._config.vision_start_token_id, self._config.vision_end_token_id
        texts = (self._tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False) for seconds in moments)
        return [token_id for text in texts for token_id in (*text, start, *[token] * count, end)]

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self._model.path, **self._model.at_revision)

    def known(self, shown: Shown) -> SeenImage | None:
        """Return a prepared image or video that is still referenced or one of the latest."""
        return self._known.get(shown)

    def seen(self, shown: Shown) -> SeenImage:
        """Return an image or a video as the model sees it; errors as of `ids`. Other threads may call it."""
        found = self.known(shown)
        if found is None:
            found = self._known[shown] = self._seen(shown)
            self._latest.append(found)
        return found

    def _seen(self, shown: Shown) -> SeenImage:
        choice = self._choice(shown) if isinstance(shown, Video) else None
        if isinstance(shown, Video):
            assert choice is not None
            assert self._videos is not None
            ids, token = self._ids_of_video(choice), self._config.video_token_id
            tensors = self._videos.tensors(frames_of(shown, choice), choice)
        elif (measured := state_in(shown)) is not None:
            tensors, ids, token = self._tensors_of_state(measured), [self._token], self._token
        else:
            tensors, token = self._tensors_of_image(shown), self._token
            count = self._of_each or int(tensors[GRID].prod()) // self._processor.merge_size**2
            ids = [token] * count
        digest = hashlib.blake2b(digest_size=16)
        for array in tensors.values():
            digest.update(str(array.shape).encode() + array.tobytes())
        return SeenImage(tensors, token, ids, digest.hexdigest(), shown, choice)

    def _tensors_of_state(self, measured: Sequence[float]) -> dict[str, np.ndarray]:
        if self._states is None:
            raise DataError("a message shows the state of a robot, which the policy does not take; set vla.use_proprio")
        return {STATES: self._states(measured)}

    def _tensors_of_image(self, image: str) -> dict[str, np.ndarray]:
        pixels = opened(image)
        try:
            found = self._processor([pixels], return_tensors="np")
        except ValueError as error:
            raise DataError(f"an image of {pixels.width} x {pixels.height} pixels: {error}") from error
        return {name: found[name] for name in ((PIXELS, GRID) if self._of_each is None else (PIXELS,))}

    def context(self, token_ids: Sequence[int], shown: Sequence[Shown]) -> Context:
        """Return tokens with as many placeholders for each image or video as it needs, where the template has written one."""
        seen = tuple(map(self.seen, shown))
        places = self.placed(token_ids, shown, [image.ids for image in seen])
        return Context([token_id for place in places for token_id in place], seen)

    def placed(
        self, token_ids: Sequence[int], shown: Sequence[Shown], ids: Sequence[Sequence[int]]
    ) -> list[Sequence[int]]:
        """Return the tokens in the place of each token of the rendered template.

        Args:
            ids: of each image or video, as of SeenImage.

        Raises:
            DataError: there are more or fewer placeholders than images and videos, or one of the other kind.
        """
        tokens = [self._config.video_token_id if isinstance(one, Video) else self._token for one in shown]
        found = [token_id for token_id in token_ids if token_id in self.never_said]
        if found != tokens:
            raise DataError(
                f"the chat template writes {len(found)} placeholders for {len(tokens)} images and videos; it must write one for each part of "
                "the type image or video. Special tokens in texts are no images"
            )
        left = iter(ids)
        return [next(left) if token_id in self.never_said else (token_id,) for token_id in token_ids]


def _processor(family: VisionFamily, model: Pretrained, options: Mapping[str, Any]) -> Any:
    """Return the image processor on Pillow and numpy: the same numbers wherever a run prepares images, with torchvision installed or not."""
    import transformers
    from transformers.image_processing_base import ImageProcessingMixin

    name = family.processor
    if name is not None and ":" in name:
        return imported(name, name).from_pretrained(model.path, **model.at_revision, **options)
    if name is None:
        entries, _ = ImageProcessingMixin.get_image_processor_dict(model.path, **model.at_revision)
        named = str(entries.get("image_processor_type", "CLIPImageProcessor"))
        name = f"{named.removesuffix('Fast').removesuffix('Pil')}Pil"
    made = getattr(transformers, name, None)
    if made is None:
        raise ValueError(f"transformers has no {name}")
    return made.from_pretrained(model.path, **model.at_revision, **options)


def _tokens_of_each(config: Any, processor: Any) -> int:
    """Return the number of tokens of an image of fixed size: one per patch, and one for the class where the tower keeps it."""
    vision = config.vision_config
    size = getattr(processor, "crop_size", None) if getattr(processor, "do_center_crop", False) else processor.size
    size = processor.size if size is None else size
    patches = (int(size["height"]) // vision.patch_size) * (int(size["width"]) // vision.patch_size)
    return patches + (vision.model_type == "clip_vision_model") - (config.vision_feature_select_strategy == "default")


def named_tensors(images: Sequence[SeenImage]) -> dict[str, np.ndarray]:
    """Return the tensors of a row's images as its sample carries them, each under its name and number: what several rows show is then kept once."""
    return {f"{name}.{at}": array for at, image in enumerate(images) for name, array in image.tensors.items()}


def row_images(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors of each image of a row, in the order of the images; the opposite of `named_tensors`."""
    found = dict[int, dict[str, Any]]()
    for key, value in tensors.items():
        name, _, at = key.rpartition(".")
        if name in (PIXELS, GRID, SECONDS, STATES):
            found.setdefault(int(at), {})[name] = value
    return [found[at] for at in sorted(found)]
