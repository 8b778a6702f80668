"""Mean losses and the mixture over them, of two FedGR runs: the picture and numbers of fedgr.md.

    fedsieve run fedgr/table1-iid-symmetric-phi1 --seed 1 --rounds 30 --out runs/with \\
        --method.preset paper --model.head mlp --engine.keep_states true
    fedsieve run fedgr/table1-iid-symmetric-phi1 --seed 1 --rounds 30 --out runs/without \\
        --method.preset paper --model.head mlp --engine.keep_states true --method.lambda_r 0.0
    python results/fedgr/sieve.py runs/with runs/without results/fedgr/sieve.png

Both runs end in the warm-up, so a client's mean loss is that of the global model alone.
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from sklearn.metrics import roc_auc_score

from fedsieve.methods import fedgr
from fedsieve.scenes import load_scene
from fedsieve.serial import decode
from fedsieve.sieve.gmm import clean_posterior, fit_mixture
from fedsieve.simulate.diagnose import Truth, correlation
from fedsieve.simulate.directory import SCENE, RunDirectory
from fedsieve.simulate.store import state_file
from fedsieve.simulate.world import load_data

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EDGES = np.linspace(1.4, 4.5, 125)


def mean_losses(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Per client the mean losses and which labels are wrong; the true noise rates."""
    directory = RunDirectory(folder)
    checkpoint = directory.last_checkpoint()
    truth = Truth.of(load_scene(folder / SCENE), load_data(directory.recipe()).train_labels.numpy())
    losses = [
        decode(fedgr.Client, state_file(directory.client_folder, k, r).read_bytes()).mean_loss
        for k, r in sorted(checkpoint.clients.items())
    ]
    clients = sorted(checkpoint.clients)
    return [x.numpy() for x in losses], [truth.wrong(k) for k in clients], truth.rates[clients]


def main(*arguments: str) -> None:
    *folders, picture = map(Path, arguments)
    figure, axes = plt.subplots(1, len(folders), figsize=(10, 3.7), sharey=True, squeeze=False)
    for axis, folder in zip(axes[0], folders, strict=True):
        losses, wrong_of, rates = mean_losses(folder)
        values, wrong = np.concatenate(losses), np.concatenate(wrong_of)
        mixture = fit_mixture(values)
        q = clean_posterior(mixture, values)
        noise = [float((clean_posterior(mixture, x) < 0.5).mean()) for x in losses]
        print(
            f"{folder}: AUROC of the mean losses {roc_auc_score(wrong, values):.2f}, of q "
            f"{roc_auc_score(~wrong, q):.2f}; Pearson of the noise ratios "
            f"{correlation(np.array(noise), rates):.2f}"
        )
        shown = np.minimum(values, EDGES[-1] - 1e-6)
        axis.hist(
            [shown[~wrong], shown[wrong]],
            EDGES,
            stacked=True,
            color=["#2b6cb0", "#e2a03f"],
            label=["right label", "wrong label"],
        )
        for name, style, mean, variance, share in zip(
            ("clean", "noisy"), "-:", mixture.means, mixture.variances, mixture.shares, strict=True
        ):
            density = share * np.exp(-((EDGES - mean) ** 2) / (2 * variance))
            density *= len(values) * (EDGES[1] - EDGES[0]) / np.sqrt(2 * np.pi * variance)
            label = f'"{name}" component: mean {mean:.2f}, variance {variance:.2f}'
            axis.plot(EDGES, density, "k" + style, lw=1.3, label=label)
        axis.set(yscale="log", ylim=(0.9, None), title=str(folder))
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("samples")
    figure.supxlabel("mean loss of a sample under the global model (last bar: 4.5 and more)")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
