"""A side of `stoker-bench data`: image loading by PyTorch's DataLoader.

    torch_data.py make FOLDER NUM       writes NUM images of 256 x 256, each as JPEG and as PNG
    torch_data.py serve FOLDER FORMAT DECODER WORKERS

The second form serves commands from stdin:

- A number loads this many batches of 32 in a new random order and responds with nanoseconds. Each
  image is cropped to 224 x 224 at a random position, randomly flipped, and normalized.
- `check N` responds with the mean and the mean square of the first N images, cropped at the top
  left.

DECODER is `pil`, as in PyTorch's tutorials, or `torchvision`, which decodes to tensors.
"""

import json
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import v2

SIZE, CROP, BATCH = 256, 224, 32
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make(directory, num):
    """Writes images with the spectrum of photographs: noise that gets weaker at finer scales."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(7)
    for index in range(num):
        picture = np.full((SIZE, SIZE, 3), 128.0)
        for scale in (4, 8, 16, 32, 64, 128, 256):
            octave = random.normal(0, 100 / scale**0.6, (scale, scale, 3))
            for channel in range(3):
                layer = Image.fromarray(octave[:, :, channel].astype(np.float32))
                layer = layer.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
                picture[:, :, channel] += np.asarray(layer)
        picture = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
        picture.save(os.path.join(directory, f"{index:05}.jpg"), quality=90)
        picture.save(os.path.join(directory, f"{index:05}.png"))


class Pictures(Dataset):
    """Images with their indexes in the list of files as labels."""

    def __init__(self, directory, file_format, decoder, crop):
        names = sorted(name for name in os.listdir(directory) if name.endswith(file_format))
        self.paths = [os.path.join(directory, name) for name in names]
        self.decoder = decoder
        normalize = v2.Normalize(MEAN, DEVIATION)
        to_floats = [v2.ToDtype(torch.float32, scale=True), normalize]
        if decoder == "pil":
            to_floats = [v2.PILToTensor(), *to_floats]
        self.transform = v2.Compose([*crop, *to_floats])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        if self.decoder == "pil":
            from PIL import Image

            with Image.open(path) as file:
                picture = file.convert("RGB")
        else:
            from torchvision.io import decode_image, read_file

            picture = decode_image(read_file(path))
        return self.transform(picture), index


def serve(directory, file_format, decoder, workers):
    torch.set_num_threads(1)
    crop = [v2.RandomCrop(CROP), v2.RandomHorizontalFlip()]
    data = Pictures(directory, file_format, decoder, crop)
    sampler = RandomSampler(data, num_samples=len(data))
    loader = DataLoader(
        data, BATCH, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    print(json.dumps({"pictures": len(data)}), flush=True)
    for line in sys.stdin:
        if line.startswith("check"):
            corner = v2.Lambda(lambda image: v2.functional.crop(image, 0, 0, CROP, CROP))
            fixed = Pictures(directory, file_format, decoder, [corner])
            pictures = torch.stack([fixed[index][0] for index in range(int(line.split()[1]))])
            mean, mean_square = pictures.mean().item(), pictures.square().mean().item()
            print(json.dumps({"mean": mean, "mean_square": mean_square}), flush=True)
            continue
        batches = int(line)
        sampler._num_samples = batches * BATCH  # Number of samples in an epoch.
        start = time.perf_counter_ns()
        count = sum(len(labels) for _, labels in loader)
        nanoseconds = time.perf_counter_ns() - start
        assert count == batches * BATCH, count
        print(json.dumps({"nanoseconds": nanoseconds}), flush=True)


if sys.argv[1] == "make":
    make(sys.argv[2], int(sys.argv[3]))
else:
    serve(*sys.argv[2:5], int(sys.argv[5]))
