"""The loss of a batch follows the paper of its method, with every term written out here by hand."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cosine_similarity, cross_entropy, gelu, softplus

from tests.federated.tiny import federation, first_turn, settings

IMAGES = 12


def turn(name, fed=None, **keys):
    """Return a turn without dropout, a batch, and the generator's state, after the model has moved."""
    work = first_turn(settings(name, dropout=0.0, **keys), fed)
    torch.manual_seed(1)
    work.workspace.flat.values.data.add_(0.05 * torch.randn_like(work.values))
    return work, work.batch(torch.arange(IMAGES)), work.generator.get_state()


def loss(work, batch):
    return work.workspace.algorithm.loss(work, batch)


def features(work, images):
    """Return the hidden units of the head, with batch norm in the mode of the network."""
    net = work.net
    return gelu(net.head.fc1(net.tokens(images).flatten(1)))


def test_quantized_features_add_two_codeword_losses():
    """Add mean (q - sg z)^2 and 0.25 mean (sg q - z)^2, with means over all elements."""
    work, batch, _ = turn("uefl", commitment=0.25)
    found = loss(work, batch)
    tokens, codebook = work.net.tokens(batch.images), work.trained["codebook"]
    segments = tokens.reshape(-1, codebook.shape[1])
    quantized = codebook[torch.cdist(segments.double(), codebook.double()).argmin(1)]
    logits = work.net.classify(quantized.reshape(tokens.shape))
    distance = (quantized - segments).square().sum() / segments.numel()
    torch.testing.assert_close(found, cross_entropy(logits, batch.labels) + 1.25 * distance)


def gaussian_samples(work, images, state, samples):
    """Return the Gaussians of the features, and the samples that the loss has drawn."""
    work.generator.set_state(state)
    noise = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=work.generator)))
    mean, before = work.net.gaussian(
        work.net.hidden(work.net.encoder(images).permute(0, 2, 3, 1).flatten(1))
    ).chunk(2, 1)
    deviation = (1 + before.exp()).log()
    return mean, deviation, mean + deviation * torch.randn(samples, *mean.shape, generator=noise)


@pytest.mark.parametrize("norm", ["l2", "l2sq"])
def test_fedsr(norm):
    """The divergence of an image begins with the Gaussian of its class, at first N(0, softplus(1)), q = 1."""
    work, batch, state = turn("fedsr", dim=8, norm_weight=0.3, divergence_weight=0.2, norm=norm)
    m, r, q = (work.trained[name] for name in ("class_mean", "class_std", "scale"))
    with torch.no_grad():
        initial = [m.abs().max(), r.min(), r.max(), softplus(q)]
        assert [float(value) for value in initial] == pytest.approx([0.0, 1.0, 1.0, 1.0])
        for tensor in (m, r, q):
            tensor += torch.randn(tensor.shape)
    found = loss(work, batch)
    mean, deviation, (sample,) = gaussian_samples(work, batch.images, state, 1)
    lengths = sample.square().sum(1) if norm == "l2sq" else sample.square().sum(1).sqrt()
    q, of_class = softplus(q), Normal(m[batch.labels], softplus(r)[batch.labels])
    divergence = kl_divergence(Normal(q * mean, q * deviation), of_class).sum(1).mean()
    torch.testing.assert_close(
        found, cross_entropy(work.net.head(sample), batch.labels) + 0.3 * lengths.mean() + 0.2 * divergence
    )


def test_fedcr():
    """The divergence begins with the Gaussian of each image's class."""
    work, batch, state = turn("fedcr", dim=8, beta=0.2, samples=3)
    classes = work.message.tensors["classes"] = torch.rand(2, 3, 8) + 0.5
    found = loss(work, batch)
    mean, deviation, samples = gaussian_samples(work, batch.images, state, 3)
    each = torch.stack([cross_entropy(work.net.head(sample), batch.labels) for sample in samples])
    of_class = Normal(*classes[:, batch.labels])
    divergence = kl_divergence(of_class, Normal(mean, deviation)).sum(1).mean()
    torch.testing.assert_close(found, each.mean() + 0.2 * divergence)


def supervised_contrast(z, labels, temperature):
    """Compute the supervised contrastive loss, anchor by anchor."""
    z = z / z.norm(dim=1, keepdim=True)
    total = 0.0
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        alike = [j for j in others if labels[j] == labels[i]]
        similar = torch.stack([z[i] @ z[j] / temperature for j in others])
        total += sum(similar.logsumexp(0) - z[i] @ z[j] / temperature for j in alike) / max(1, len(alike))
    return total / len(z)


@pytest.mark.parametrize("epoch", [4, 5])
def test_vhl(epoch):
    work, batch, state = turn(
        "vhl",
        virtual_batch=5,
        virtual_weight=0.7,
        pull=0.6,
        virtual_contrast=0.4,
        temperature=0.2,
        local_epochs=6,
    )
    work.epoch = epoch
    found = loss(work, batch)
    work.generator.set_state(state)
    virtual = work.memory["virtual"]
    chosen = torch.randint(len(virtual), (5,), generator=work.generator)
    labels = virtual.labels[chosen]
    z = features(work, torch.cat([batch.images, work.workspace.normalize(virtual.images[chosen])]))
    logits = torch.cat([work.net.head.fc2(z), work.net.head.virtual(z)], 1)
    expected = cross_entropy(logits[:IMAGES], batch.labels) + 0.7 * cross_entropy(logits[IMAGES:], 3 + labels)
    if epoch < 5:
        expected = expected + 0.6 * supervised_contrast(z, torch.cat([batch.labels, labels]), 0.2)
        expected = expected + 0.4 * supervised_contrast(z[IMAGES:], labels, 0.2)
    torch.testing.assert_close(found, expected)


def test_fedbr():
    """Pseudo-images pass batch norm separately from the client's images."""
    work, batch, _ = turn(
        "fedbr", federation((148, 148, 148)), contrast=0.7, uniform=0.6, pseudo=8, pull=1.5, push=0.5
    )
    work.memory["received"] = work.memory["received"] + torch.randn(8, 16)
    with torch.no_grad():
        before = work.workspace.flat.buffers.clone()
        pseudo = features(work, work.memory["pseudo"])
        said = work.net.head.fc2(pseudo)
        work.workspace.flat.buffers.copy_(before)
    found = loss(work, batch)  # the projection head has taken its step
    own, project = features(work, batch.images), work.memory["projector"]
    to_sent, to_own = (
        cosine_similarity(project(pseudo), project(other)) for other in (work.memory["received"], own[:8])
    )
    contrast = (1 + (0.5 * to_own - 1.5 * to_sent).exp()).log().mean()
    uniform = -said.log_softmax(1).mean(1).mean()
    torch.testing.assert_close(
        found, cross_entropy(work.net.head.fc2(own), batch.labels) + 0.7 * contrast + 0.6 * uniform
    )


def test_an_offset_of_distrans_goes_down_the_slope_of_the_loss():
    work, batch, _ = turn("distrans", offset_lr=2.0)
    offset = work.net.offset
    before = offset.detach().clone()
    loss(work, batch).backward()
    slope = offset.grad.clone()
    assert slope.norm() > 0
    work.workspace.algorithm.after_batch(work, batch)
    torch.testing.assert_close(offset.detach(), before - 2 * slope)
    assert offset.grad is None
