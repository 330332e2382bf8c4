"""The right values: every function from its paper's formula, in explicit loops and 50-digit decimal arithmetic.

Nothing here shares code with minirl, and nothing but Python's standard library is imported. A formula takes numbers as
Decimal (the exact value of a float64) in nested lists and returns a dict of `value`, `gradients` and `stats`, as far as
it has them. Its docstring is the `derivation` in the JSON file. Gradients are derived by hand; make_vectors.py confirms
each against central differences of the value. Where a value is no scalar, the gradients are those of
Σ cotangent · value. An entry outside a mask is never read.
"""

from decimal import Decimal, getcontext
from functools import cache

getcontext().prec = 50
ZERO, ONE, HALF = Decimal(0), Decimal(1), Decimal("0.5")
PI = Decimal("3.14159265358979323846264338327950288419716939937511")
FORMULAS = []  # in reading order; each carries .module, .source, .constants, .conventions


def vectors(module, source, constants=(), conventions=None):
    """Register a formula: the minirl module it checks, its paper, the inputs that no gradient may reach."""

    def register(formula):
        formula.module, formula.source = module, source
        formula.constants, formula.conventions = list(constants), conventions
        FORMULAS.append(formula)
        return formula

    return register


@cache
def exp(x):
    """e^x, correctly rounded to 50 digits; remembered, for central differences move one entry at a time."""
    return x.exp()


@cache
def log(x):
    """ln x, correctly rounded to 50 digits."""
    return x.ln()


def total(numbers):
    """Sum that is a Decimal even when there is nothing to add."""
    return sum(numbers, ZERO)


def dot(a, b):
    """Σ a_i b_i."""
    return total(x * y for x, y in zip(a, b, strict=True))


def power(x, n):
    """x^n with 0^0 = 1, which Decimal refuses."""
    return x**n if n else ONE


def cells(mask):
    """The (row, column) of every 1 of a mask."""
    return [(b, t) for b, row in enumerate(mask) for t, on in enumerate(row) if on]


def grid(like, entries):
    """A matrix of the shape of `like`: zeros but for `entries`, a dict (row, column) -> number."""
    return [[entries.get((b, t), ZERO) for t in range(len(row))] for b, row in enumerate(like)]


def everywhere(like):
    """A mask of ones in the shape of `like`."""
    return [[1] * len(row) for row in like]


def log_softmax(logits):
    """log softmax of one list; -Infinity stays -Infinity."""
    norm = log(total(exp(logit) for logit in logits))
    return [logit - norm for logit in logits]


# --- functional/masked.py


def bundles(mask, dim):
    """For every entry of the output, the cells that are added up for it."""
    if dim is None:
        return [cells(mask)]
    groups = [[] for _ in (mask if dim == 1 else mask[0])]
    for b, t in cells(mask):
        groups[b if dim == 1 else t].append((b, t))
    return groups


def sum_or_mean(x, mask, dim, cotangent, divisor):
    values, gradient = [], {}
    for group, weight in zip(bundles(mask, dim), cotangent or [ONE], strict=True):
        values.append(total(x[b][t] for b, t in group) / divisor(group))
        gradient |= {cell: weight / divisor(group) for cell in group}
    return {"value": values[0] if dim is None else values, "gradients": {"x": grid(mask, gradient)}}


@vectors("minirl.functional.masked", "definition")
def masked_sum(x, mask, dim=None, cotangent=None):
    """Σ of x where mask is 1 (dim 0: per column, dim 1: per row). d/dx = cotangent on the mask, else 0."""
    return sum_or_mean(x, mask, dim, cotangent, lambda group: ONE)


@vectors("minirl.functional.masked", "definition", conventions="an empty mask has mean 0 and gradient 0")
def masked_mean(x, mask, dim=None, cotangent=None):
    """Σ of x where mask is 1, divided by the number N of such cells. d/dx = cotangent / N on the mask, else 0."""
    return sum_or_mean(x, mask, dim, cotangent, lambda group: max(len(group), 1))


@vectors(
    "minirl.functional.masked", "definition",
    conventions="sample deviation; eps added to it; zeros where N < 2 or s < 1e-6 max(1, max|x|)",
)
def masked_whiten(x, mask, eps=Decimal(1e-8), cotangent=None):
    """y_i = (x_i - m) / (s + eps), s^2 = Σ (x_i - m)^2 / (N - 1). With g = cotangent and c = x - m:
    d/dx_j = (g_j - mean g) / (s + eps) - Σ_i g_i c_i / (s + eps)^2 · c_j / ((N - 1) s)."""
    inside = cells(mask)
    if len(inside) < 2:
        return {"value": grid(mask, {})}
    mean = total(x[b][t] for b, t in inside) / len(inside)
    centred = {(b, t): x[b][t] - mean for b, t in inside}
    deviation = (total(c * c for c in centred.values()) / (len(inside) - 1)).sqrt()
    if deviation < Decimal(1e-6) * max(ONE, max(abs(x[b][t]) for b, t in inside)):
        return {"value": grid(mask, {})}
    scale, weight = deviation + eps, {(b, t): cotangent[b][t] for b, t in inside}
    shared = total(weight[cell] * centred[cell] for cell in inside) / (scale**2 * (len(inside) - 1) * deviation)
    average = total(weight.values()) / len(inside)
    gradient = {cell: (weight[cell] - average) / scale - shared * centred[cell] for cell in inside}
    return {
        "value": grid(mask, {cell: c / scale for cell, c in centred.items()}),
        "gradients": {"x": grid(mask, gradient)},
    }


@vectors("minirl.functional.masked", "definition")
def token_logprobs(logits, actions, temperature=ONE, cotangent=None):
    """log p_a = z_a / T - log Σ_v exp(z_v / T). d/dz_v = cotangent (1[v = a] - p_v) / T."""
    logprobs = [[log_softmax([z / temperature for z in token]) for token in row] for row in logits]
    value = [[logprobs[b][t][action] for t, action in enumerate(row)] for b, row in enumerate(actions)]
    gradient = [
        [
            [cotangent[b][t] * ((v == actions[b][t]) - exp(logp)) / temperature for v, logp in enumerate(token)]
            for t, token in enumerate(row)
        ]
        for b, row in enumerate(logprobs)
    ]
    return {"value": value, "gradients": {"logits": gradient}}


@vectors("minirl.functional.masked", "definition", conventions="0 · log 0 = 0, with gradient 0")
def entropy(logits, cotangent=None):
    """H = -Σ_v p_v log p_v. d/dz_v = -cotangent p_v (log p_v + H)."""
    value, gradient = [], []
    for b, row in enumerate(logits):
        value.append([])
        gradient.append([])
        for t, token in enumerate(row):
            logprobs = log_softmax(token)
            h = -total(exp(logp) * logp for logp in logprobs if logp.is_finite())
            value[b].append(h)
            gradient[b].append(
                [-cotangent[b][t] * exp(logp) * (logp + h) if logp.is_finite() else ZERO for logp in logprobs]
            )
    return {"value": value, "gradients": {"logits": gradient}}


# --- functional/kl.py


def estimator(logprobs, ref_logprobs, cotangent, value, slope):
    """Entry by entry: the value and its slope as functions of x = log π - log π_ref."""
    x = {(b, t): logprobs[b][t] - ref_logprobs[b][t] for b, t in cells(everywhere(logprobs))}
    gradient = {(b, t): cotangent[b][t] * slope(x[b, t]) for b, t in x}
    return {
        "value": grid(logprobs, {cell: value(difference) for cell, difference in x.items()}),
        "gradients": {
            "logprobs": grid(logprobs, gradient),
            "ref_logprobs": grid(logprobs, {cell: -slope for cell, slope in gradient.items()}),
        },
    }


SCHULMAN = "Schulman, Approximating KL divergence (2020)"


@vectors("minirl.functional.kl", SCHULMAN)
def k1(logprobs, ref_logprobs, cotangent=None):
    """x = log π - log π_ref; slope 1."""
    return estimator(logprobs, ref_logprobs, cotangent, lambda x: x, lambda x: ONE)


@vectors("minirl.functional.kl", SCHULMAN)
def k2(logprobs, ref_logprobs, cotangent=None):
    """x^2 / 2 with x = log π - log π_ref; slope x."""
    return estimator(logprobs, ref_logprobs, cotangent, lambda x: x * x / 2, lambda x: x)


@vectors("minirl.functional.kl", SCHULMAN + "; Shao et al. 2024, eq. 4")
def k3(logprobs, ref_logprobs, cotangent=None):
    """π_ref/π - log(π_ref/π) - 1 = e^(-x) + x - 1 with x = log π - log π_ref; slope 1 - e^(-x)."""
    return estimator(logprobs, ref_logprobs, cotangent, lambda x: exp(-x) + x - 1, lambda x: 1 - exp(-x))


def kl_of_logprobs(p, q):
    """Σ_v p_v (log p_v - log q_v) of two lists of log-probabilities; a v with p_v = 0 contributes 0."""
    return total(exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a.is_finite())


@vectors(
    "minirl.functional.kl", "definition",
    conventions="0 · log(0 / q) = 0; infinite where q forbids what p does not",
)
def categorical_kl(p_logits, q_logits, cotangent=None):
    """KL(p||q) = Σ_v p_v (log p_v - log q_v). d/d p_logit_v = cotangent p_v (log p_v - log q_v - KL), d/d q_logit_v =
    cotangent (q_v - p_v)."""
    rows = [(log_softmax(p), log_softmax(q)) for p, q in zip(p_logits, q_logits, strict=True)]
    value = [kl_of_logprobs(p, q) for p, q in rows]
    if not all(kl.is_finite() for kl in value):
        return {"value": value}
    p_gradient, q_gradient = [], []
    for (p, q), kl, weight in zip(rows, value, cotangent, strict=True):
        pairs = list(zip(p, q, strict=True))
        p_gradient.append([weight * exp(a) * (a - b - kl) if a.is_finite() else ZERO for a, b in pairs])
        q_gradient.append([weight * (exp(b) - exp(a)) for a, b in pairs])
    return {"value": value, "gradients": {"p_logits": p_gradient, "q_logits": q_gradient}}


@vectors("minirl.functional.kl", "definition")
def gaussian_kl(p_mean, p_std, q_mean, q_std, cotangent=None):
    """Σ_d log(σ_q/σ_p) + (σ_p^2 + m^2) / (2 σ_q^2) - 1/2, m = μ_p - μ_q. d/dμ_p = m/σ_q^2 = -d/dμ_q,
    d/dσ_p = σ_p/σ_q^2 - 1/σ_p, d/dσ_q = 1/σ_q - (σ_p^2 + m^2)/σ_q^3, each times the cotangent."""
    value, gradients = [], {name: [] for name in ("p_mean", "p_std", "q_mean", "q_std")}
    for *rows, weight in zip(p_mean, p_std, q_mean, q_std, cotangent, strict=True):
        parts = {name: [] for name in gradients}
        kl = ZERO
        for mp, sp, mq, sq in zip(*rows, strict=True):
            shift, spread = mp - mq, sp**2 + (mp - mq) ** 2
            kl += log(sq) - log(sp) + spread / (2 * sq**2) - HALF
            parts["p_mean"].append(weight * shift / sq**2)
            parts["q_mean"].append(-weight * shift / sq**2)
            parts["p_std"].append(weight * (sp / sq**2 - 1 / sp))
            parts["q_std"].append(weight * (1 / sq - spread / sq**3))
        value.append(kl)
        for name, part in parts.items():
            gradients[name].append(part)
    return {"value": value, "gradients": gradients}


# --- functional/returns.py


def steps_from(t, terminated, truncated):
    """t, t + 1, … up to the end of t's episode in one row."""
    for k in range(t, len(terminated)):
        yield k
        if terminated[k] or truncated[k]:
            return


@vectors("minirl.functional.returns", "Sutton and Barto 2018, eq. 3.8", conventions="either flag ends the sum")
def rewards_to_go(rewards, terminated, truncated, gamma):
    """G_t = Σ_{k >= t, up to the end of t's episode} γ^(k - t) r_k, summed anew for every t."""
    value = [
        [total(power(gamma, k - t) * row[k] for k in steps_from(t, ends, cuts)) for t in range(len(row))]
        for row, ends, cuts in zip(rewards, terminated, truncated, strict=True)
    ]
    return {"value": value}


@vectors(
    "minirl.functional.returns", "Schulman et al. 2016, section 3, eq. 16",
    conventions="a truncated step is bootstrapped from next_values, a terminated one is not; terminated wins",
)
def gae(rewards, values, next_values, terminated, truncated, gamma, lam):
    """A_t = Σ_{k >= t, up to the end of t's episode} (γλ)^(k - t) δ_k, δ_k = r_k + γ V(s_{k+1}) - V(s_k) with
    V(s_{k+1}) = next_values_k, or 0 where step k terminated; summed anew for every t. returns = A + V."""
    advantages, returns = [], []
    for b, ends in enumerate(terminated):
        deltas = [
            rewards[b][k] + (ZERO if end else gamma * next_values[b][k]) - values[b][k] for k, end in enumerate(ends)
        ]
        row = [
            total(power(gamma * lam, k - t) * deltas[k] for k in steps_from(t, ends, truncated[b]))
            for t in range(len(deltas))
        ]
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, values[b], strict=True)])
    return {"value": {"advantages": advantages, "returns": returns}}


@vectors(
    "minirl.functional.returns", "Ziegler et al. 2019, eq. 2",
    conventions="0 outside the mask; a row without any real token receives nothing",
)
def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """r_t = -kl_coef (log π - log π_ref) on the mask, plus the row's score on the row's last cell of the mask."""
    rewards = {(b, t): -kl_coef * (logprobs[b][t] - ref_logprobs[b][t]) for b, t in cells(mask)}
    for b, score in enumerate(scores):
        columns = [t for row, t in cells(mask) if row == b]
        if columns:
            rewards[b, max(columns)] += score
    return {"value": grid(mask, rewards)}


@vectors("minirl.functional.returns", "definition", conventions="NaN where the returns do not vary")
def explained_variance(values, returns, mask=None):
    """1 - Var[R - V] / Var[R], where Var[x] = mean x^2 - (mean x)^2 over the mask."""
    inside = cells(mask or everywhere(values))

    def variance(numbers):
        return total(n * n for n in numbers) / len(numbers) - (total(numbers) / len(numbers)) ** 2

    spread = variance([returns[b][t] for b, t in inside]) if inside else ZERO
    if not spread:
        return {"value": Decimal("NaN")}
    return {"value": 1 - variance([returns[b][t] - values[b][t] for b, t in inside]) / spread}


# --- algorithms/sft.py, algorithms/reinforce.py


@vectors(
    "minirl.algorithms.sft", "Ouyang et al. 2022, section 3.5",
    conventions="one mean over all tokens, not a mean of row means",
)
def sft_loss(logits, actions, mask):
    """L = -(1/N) Σ_mask log p_a. d/dz_v = (p_v - 1[v = a]) / N on the mask, else 0."""
    inside = cells(mask)
    count = max(len(inside), 1)
    gradient = [[[ZERO] * len(token) for token in row] for row in logits]
    loss, hits = ZERO, 0
    for b, t in inside:
        logprobs, action = log_softmax(logits[b][t]), actions[b][t]
        loss -= logprobs[action] / count
        hits += max(logprobs) == logprobs[action]
        gradient[b][t] = [(exp(logp) - (v == action)) / count for v, logp in enumerate(logprobs)]
    stats = {"loss": loss, "token_accuracy": Decimal(hits) / count, "count": len(inside)}
    return {"value": loss, "stats": stats, "gradients": {"logits": gradient}}


@vectors(
    "minirl.algorithms.sft", "Ouyang et al. 2022, section 3.5",
    conventions="one mean over all tokens, not a mean of row means",
)
def likelihood_loss(logprobs, mask):
    """L = -(1/N) Σ_mask log π. d/d log π = -1/N on the mask, else 0."""
    inside = cells(mask)
    count = max(len(inside), 1)
    loss = -total(logprobs[b][t] for b, t in inside) / count
    gradient = grid(mask, {cell: -ONE / count for cell in inside})
    return {"value": loss, "stats": {"loss": loss, "count": len(inside)}, "gradients": {"logprobs": gradient}}


@vectors("minirl.algorithms.reinforce", "Williams 1992, theorem 2", constants=["advantages"])
def policy_gradient_loss(logprobs, advantages, mask, reduction="token"):
    """L = -Σ_mask A log π / n, n = number of rows (trajectory) or of cells in the mask (token). d/d log π = -A / n."""
    inside = cells(mask)
    count = len(mask) if reduction == "trajectory" else len(inside)
    divisor = max(count, 1)
    loss = -total(advantages[b][t] * logprobs[b][t] for b, t in inside) / divisor
    gradient = grid(mask, {(b, t): -advantages[b][t] / divisor for b, t in inside})
    return {"value": loss, "stats": {"policy_loss": loss, "count": count}, "gradients": {"logprobs": gradient}}


@vectors("minirl.algorithms.reinforce", "Ahmadian et al. 2024, section 2.3")
def leave_one_out(scores, group_size):
    """A_i = R_i - mean of the other rows of the group, each mean taken over a list without row i."""
    value = []
    for start in range(0, len(scores), group_size):
        group = scores[start : start + group_size]
        for i, score in enumerate(group):
            others = group[:i] + group[i + 1 :]
            value.append(score - total(others) / len(others))
    return {"value": value}


@vectors(
    "minirl.algorithms.reinforce", "Williams 1992, section 4 (baseline); Kingma and Ba 2015, section 3 (start at 0)",
    conventions="before the n-th of the returns: its n - 1 predecessors; 0 before the first",
)
def EMABaseline(returns, decay):  # noqa: N802  the class it checks
    """b_n = Σ_{i < n} w_i R_i / Σ_{i < n} w_i with w_i = decay^(n - 1 - i): n + 1 baselines, each used before the
    return of the same position is taken in."""
    value = []
    for n in range(len(returns) + 1):
        weights = [power(decay, n - 1 - i) for i in range(n)]
        value.append(dot(weights, returns[:n]) / total(weights) if n else ZERO)
    return {"value": value}


# --- algorithms/trpo.py


def ratios(logprobs, old_logprobs, mask):
    """exp(log π - log π_old) of every cell of the mask."""
    return {(b, t): exp(logprobs[b][t] - old_logprobs[b][t]) for b, t in cells(mask)}


def ratio_stats(ratio, low, high):
    """Statistics of the ratios on the mask; the mean of k3(old, new) is that of r - 1 - log r."""
    count = max(len(ratio), 1)
    return {
        "ratio_max": max(ratio.values(), default=ZERO),
        "clip_fraction": Decimal(sum(r < 1 - low or r > 1 + high for r in ratio.values())) / count,
        "kl_old_new": total(r - 1 - log(r) for r in ratio.values()) / count,
        "count": len(ratio),
    }


@vectors("minirl.algorithms.trpo", "Schulman et al. 2015, eq. 14", constants=["old_logprobs", "advantages"])
def surrogate_loss(logprobs, old_logprobs, advantages, mask):
    """L = -(1/N) Σ_mask r A, r = exp(log π - log π_old). d/d log π = -r A / N."""
    ratio = ratios(logprobs, old_logprobs, mask)
    count = max(len(ratio), 1)
    loss = -total(r * advantages[b][t] for (b, t), r in ratio.items()) / count
    gradient = grid(mask, {(b, t): -r * advantages[b][t] / count for (b, t), r in ratio.items()})
    stats = {"policy_loss": loss, "ratio_max": max(ratio.values(), default=ZERO), "count": len(ratio)}
    return {"value": loss, "stats": stats, "gradients": {"logprobs": gradient}}


def solve_positive(matrix, b):
    """matrix⁻¹ b by elimination; None unless the symmetric matrix is positive definite: all pivots are positive."""
    rows = [[*row, right] for row, right in zip(matrix, b, strict=True)]
    for i, row in enumerate(rows):
        if row[i] <= 0:
            return None
        for other in rows[:i] + rows[i + 1 :]:
            factor = other[i] / row[i]
            other[:] = [x - factor * y for x, y in zip(other, row, strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


@vectors(
    "minirl.algorithms.trpo", "Hestenes and Stiefel 1952; Schulman et al. 2015, appendix C",
    conventions="stops at a squared residual <= tolerance (default 1e-10); without positive curvature ends where it is",
)
def conjugate_gradient(matrix, b, iterations=10, tolerance=Decimal(1e-10)):
    """The k-th iterate minimises x'Fx/2 - b'x over span(b, Fb, …, F^(k-1) b): with an orthogonal basis V of that span,
    x = V (V'FV)^-1 V'b, solved by elimination. No recursion of the conjugate-gradient method is used."""
    x, basis, image = [ZERO] * len(b), [], b
    for _ in range(iterations):
        residual = [bi - dot(row, x) for bi, row in zip(b, matrix, strict=True)]
        if dot(residual, residual) <= tolerance:
            break
        for v in basis:
            share = dot(v, image) / dot(v, v)
            image = [p - share * vi for p, vi in zip(image, v, strict=True)]
        basis.append(image)
        image = [dot(row, image) for row in matrix]
        images = [[dot(row, v) for row in matrix] for v in basis]
        weights = solve_positive([[dot(v, fv) for fv in images] for v in basis], [dot(v, b) for v in basis])
        if weights is None:
            break
        x = [total(w * v[i] for w, v in zip(weights, basis, strict=True)) for i in range(len(b))]
    return {"value": x}


class Policy:
    """A linear policy: `categorical` has logits W·obs, `gaussian` has means W·obs and constant log-deviations.

    Its parameter vector is W row by row, then log_std.
    """

    def __init__(self, distribution, weight, log_std=()):
        self.categorical, self.width = distribution == "categorical", len(weight[0])
        self.theta = [w for row in weight for w in row] + list(log_std)
        self.rows = len(weight)

    def outputs(self, theta, obs):
        return [dot(theta[i * self.width : (i + 1) * self.width], obs) for i in range(self.rows)]

    def log_stds(self, theta):
        return theta[self.rows * self.width :]

    def log_prob(self, theta, obs, action):
        outputs = self.outputs(theta, obs)
        if self.categorical:
            return log_softmax(outputs)[action]
        return total(
            -((a - mean) ** 2) / (2 * exp(2 * s)) - s - log(2 * PI) / 2
            for a, mean, s in zip(action, outputs, self.log_stds(theta), strict=True)
        )

    def score(self, theta, obs, action):
        """∇_θ log π(action | obs)."""
        outputs = self.outputs(theta, obs)
        if self.categorical:
            pulls = [(v == action) - exp(logp) for v, logp in enumerate(log_softmax(outputs))]
            return [pull * x for pull in pulls for x in obs]
        pairs = list(zip(action, outputs, self.log_stds(theta), strict=True))
        pulls = [(a - mean) / exp(2 * s) for a, mean, s in pairs]
        return [pull * x for pull in pulls for x in obs] + [(a - mean) ** 2 / exp(2 * s) - 1 for a, mean, s in pairs]

    def fisher(self, obs):
        """E_a[score score'] in one state: summed over all actions, or from the moments of a Gaussian."""
        size = len(self.theta)
        if self.categorical:
            matrix = [[ZERO] * size for _ in range(size)]
            for action, logp in enumerate(log_softmax(self.outputs(self.theta, obs))):
                score = self.score(self.theta, obs, action)
                matrix = [[m + exp(logp) * s * r for m, r in zip(row, score, strict=True)]
                          for row, s in zip(matrix, score, strict=True)]  # fmt: skip
            return matrix
        weights, deviations = self.rows * self.width, self.log_stds(self.theta)
        matrix = [[ZERO] * size for _ in range(size)]
        for i in range(weights):  # E[(a - mean)^2] / σ^4 = 1 / σ^2; different dimensions are independent
            for j in range(i // self.width * self.width, (i // self.width + 1) * self.width):
                matrix[i][j] = obs[i % self.width] * obs[j % self.width] / exp(2 * deviations[i // self.width])
        for i in range(weights, size):  # E[((a - mean)^2 / σ^2 - 1)^2] = 3 - 2 + 1
            matrix[i][i] = Decimal(2)
        return matrix

    def kl(self, theta, obs):
        """KL(π_self(·|obs) || π_theta(·|obs))."""
        old, new = self.outputs(self.theta, obs), self.outputs(theta, obs)
        if self.categorical:
            return kl_of_logprobs(log_softmax(old), log_softmax(new))
        deviations = [[exp(s) for s in self.log_stds(t)] for t in (self.theta, theta)]
        return gaussian_kl([old], [deviations[0]], [new], [deviations[1]], [ONE])["value"][0]

    def entropy(self, obs):
        if self.categorical:
            return entropy([[self.outputs(self.theta, obs)]], [[ONE]])["value"][0][0]
        return total(HALF + log(2 * PI) / 2 + s for s in self.log_stds(self.theta))


def mean_fisher(policy, obs, mask, damping):
    """Fisher matrix averaged over the states of the mask, with damping on its diagonal."""
    inside = cells(mask)
    size = len(policy.theta)
    matrix = [[damping * (i == j) for j in range(size)] for i in range(size)]
    for b, t in inside:
        fisher = policy.fisher(obs[b][t])
        matrix = [
            [m + entry / len(inside) for m, entry in zip(*rows, strict=True)]
            for rows in zip(matrix, fisher, strict=True)
        ]
    return matrix


@vectors("minirl.algorithms.trpo", "Schulman et al. 2015, appendix C")
def fisher_vector_product(policy, obs, mask, vector, damping=Decimal(0.1)):
    """(F + damping 1) v with F = mean over the mask of E_a[∇log π ∇log π'], summed over all actions (categorical) or
    from the moments of a Gaussian (1/σ^2 per mean, 2 per log-deviation). No KL is differentiated."""
    return {"value": [dot(row, vector) for row in mean_fisher(Policy(**policy), obs, mask, damping)]}


@vectors(
    "minirl.algorithms.trpo", "Schulman et al. 2015, eq. 14 and appendix C",
    conventions="the step's length counts the damping; the first backtrack^j with mean KL(old||new) <= delta and a "
    "better surrogate is taken, and where there is none the old parameters stay, with gain and KL 0",
)
def trust_region_step(
    policy, obs, actions, old_logprobs, advantages, mask,
    delta=Decimal(0.01), damping=Decimal(0.1), iterations=10, backtrack=Decimal(0.8), max_backtracks=10,
):  # fmt: skip
    """g = (1/N) Σ_mask r A ∇log π; x = (F + damping 1)^-1 g, as conjugate_gradient's vectors have it; step
    sqrt(2 delta / x'(F + damping 1)x) x, shortened by backtrack^j until the exact KL and the exact surrogate agree."""
    policy = Policy(**policy)
    inside = cells(mask)

    def ratios_at(theta):
        return [
            exp(policy.log_prob(theta, obs[b][t], actions[b][t]) - old_logprobs[b][t]) for b, t in inside
        ]

    weights = [advantages[b][t] for b, t in inside]
    scores = [policy.score(policy.theta, obs[b][t], actions[b][t]) for b, t in inside]
    old_ratios = ratios_at(policy.theta)
    surrogate = dot(old_ratios, weights) / len(inside)
    gradient = [
        total(r * a * score[i] for r, a, score in zip(old_ratios, weights, scores, strict=True)) / len(inside)
        for i in range(len(policy.theta))
    ]
    norm = dot(gradient, gradient).sqrt()
    theta, kl, gain, accepted, ratio = policy.theta, ZERO, ZERO, 0, old_ratios
    tries = max_backtracks
    if norm:
        matrix = mean_fisher(policy, obs, mask, damping)
        x = conjugate_gradient(matrix, gradient, iterations, tolerance=Decimal("1e-40"))["value"]
        length = (2 * delta / dot(x, [dot(row, x) for row in matrix])).sqrt()
        for j in range(max_backtracks + 1):
            trial = [p + backtrack**j * length * xi for p, xi in zip(policy.theta, x, strict=True)]
            trial_kl = total(policy.kl(trial, obs[b][t]) for b, t in inside) / len(inside)
            trial_ratio = ratios_at(trial)
            trial_gain = dot(trial_ratio, weights) / len(inside) - surrogate
            if trial_kl <= delta and trial_gain > 0:
                theta, kl, gain, accepted, ratio, tries = trial, trial_kl, trial_gain, 1, trial_ratio, j
                break
    stats = {
        "accepted": accepted, "backtracks": tries, "kl_old_new": kl, "surrogate_gain": gain,
        "policy_loss": -surrogate, "ratio_max": max(ratio), "grad_norm": norm, "count": len(inside),
        "entropy": total(policy.entropy(obs[b][t]) for b, t in inside) / len(inside),
    }  # fmt: skip
    return {"value": theta, "stats": stats}


# --- algorithms/ppo.py, algorithms/ppo_kl.py


def bounds(clip):
    return clip if isinstance(clip, list) else (clip, clip)


def clipped(ratio, advantage, clip):
    """(min(r A, clip(r) A), slope in r): the slope is A unless the ratio has left the interval where A wants it to."""
    low, high = bounds(clip)
    inside = max(1 - low, min(1 + high, ratio))
    gone = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    return min(ratio * advantage, inside * advantage), ZERO if gone else advantage


@vectors("minirl.algorithms.ppo", "Schulman et al. 2017, eq. 7", constants=["advantages"])
def clipped_surrogate(ratio, advantages, clip=Decimal(0.2), cotangent=None):
    """min(r A, clip(r, 1 - low, 1 + high) A), entry by entry. d/dr = cotangent A, or 0 where A > 0 and r > 1 + high or
    A < 0 and r < 1 - low."""
    parts = {(b, t): clipped(ratio[b][t], advantages[b][t], clip) for b, t in cells(everywhere(ratio))}
    return {
        "value": grid(ratio, {cell: value for cell, (value, _) in parts.items()}),
        "gradients": {"ratio": grid(ratio, {(b, t): cotangent[b][t] * slope for (b, t), (_, slope) in parts.items()})},
    }


@vectors("minirl.algorithms.ppo", "Schulman et al. 2017, eq. 7", constants=["old_logprobs", "advantages"])
def clipped_surrogate_loss(logprobs, old_logprobs, advantages, mask, clip=Decimal(0.2)):
    """L = -(1/N) Σ_mask min(r A, clip(r, 1 - low, 1 + high) A). d/d log π = -r A / N, or 0 where A > 0 and
    r > 1 + high or A < 0 and r < 1 - low."""
    ratio = ratios(logprobs, old_logprobs, mask)
    count = max(len(ratio), 1)
    parts = {(b, t): clipped(r, advantages[b][t], clip) for (b, t), r in ratio.items()}
    loss = -total(value for value, _ in parts.values()) / count
    gradient = grid(mask, {cell: -ratio[cell] * slope / count for cell, (_, slope) in parts.items()})
    stats = {"policy_loss": loss} | ratio_stats(ratio, *bounds(clip))
    return {"value": loss, "stats": stats, "gradients": {"logprobs": gradient}}


@vectors(
    "minirl.algorithms.ppo", "OpenAI baselines, ppo2", constants=["old_values", "returns"],
    conventions="half the squared error",
)
def value_loss(values, old_values, returns, mask, clip=None):
    """L = (1/2N) Σ_mask (V - R)^2, or with clip (1/2N) Σ_mask max((V - R)^2, (V_c - R)^2),
    V_c = V_old + clamp(V - V_old, -clip, clip). d/dV = (V - R) / N, or 0 where the clipped square is the larger."""
    inside = cells(mask)
    count = max(len(inside), 1)
    loss, gradient = ZERO, {}
    for b, t in inside:
        error, slope = (values[b][t] - returns[b][t]) ** 2, values[b][t] - returns[b][t]
        if clip is not None:
            move = max(-clip, min(clip, values[b][t] - old_values[b][t]))
            other = (old_values[b][t] + move - returns[b][t]) ** 2
            if other > error:
                error, slope = other, ZERO
        loss += error / (2 * count)
        gradient[b, t] = slope / count
    stats = {"value_loss": loss, "count": len(inside)}
    return {"value": loss, "stats": stats, "gradients": {"values": grid(mask, gradient)}}


@vectors(
    "minirl.algorithms.ppo_kl", "Schulman et al. 2017, eq. 8", constants=["old_logprobs", "advantages"],
    conventions="clip_fraction counts ratios outside 1 ± 0.2",
)
def kl_penalty_loss(logprobs, old_logprobs, advantages, kl, mask, beta=ONE):
    """L = -(1/N) Σ_mask (r A - β KL). d/d log π = -r A / N, d/d KL = β / N."""
    ratio = ratios(logprobs, old_logprobs, mask)
    count = max(len(ratio), 1)
    loss = -total(r * advantages[b][t] - beta * kl[b][t] for (b, t), r in ratio.items()) / count
    gradients = {
        "logprobs": grid(mask, {(b, t): -r * advantages[b][t] / count for (b, t), r in ratio.items()}),
        "kl": grid(mask, {cell: beta / count for cell in ratio}),
    }
    stats = {"policy_loss": loss} | ratio_stats(ratio, Decimal(0.2), Decimal(0.2))
    stats["kl_old_new"] = total(kl[b][t] for b, t in ratio) / count
    return {"value": loss, "stats": stats, "gradients": gradients}


@vectors("minirl.algorithms.ppo_kl", "Schulman et al. 2017, section 4")
def adapt_beta(beta, kl, target):
    """β/2 where 1.5 KL < target, 2β where KL > 1.5 target, else β."""
    return {"value": beta / 2 if kl * 3 / 2 < target else beta * 2 if kl > target * 3 / 2 else beta}


# --- algorithms/grpo.py


def group_scaled(numbers, eps):
    """(x - mean) / (s + eps) of a list, s the sample deviation; zeros where there is no deviation to speak of."""
    if len(numbers) < 2:
        return [ZERO] * len(numbers)
    centred = [n - total(numbers) / len(numbers) for n in numbers]
    deviation = (dot(centred, centred) / (len(numbers) - 1)).sqrt()
    noise = deviation < Decimal(1e-6) * max(ONE, max(abs(n) for n in numbers))
    return [ZERO if noise else c / (deviation + eps) for c in centred]


@vectors(
    "minirl.algorithms.grpo", "Shao et al. 2024, section 4.1.2; without scale Liu et al. 2025",
    conventions="rows of a group contiguous; sample deviation s; eps (1e-4) added; 0 where s < 1e-6 max(1, max|R|)",
)
def group_advantages(scores, group_size, scale=True, eps=Decimal(1e-4)):
    """A_i = (R_i - mean R) / (s + eps) within the group; without scale R_i - mean R."""
    value = []
    for start in range(0, len(scores), group_size):
        group = scores[start : start + group_size]
        value += group_scaled(group, eps) if scale else [r - total(group) / group_size for r in group]
    return {"value": value}


@vectors(
    "minirl.algorithms.grpo", "Shao et al. 2024, section 4.1.3",
    conventions="as group_advantages, over all steps of the group; fewer than two steps give 0",
)
def process_supervision_advantages(step_rewards, step_ends, group_size, eps=Decimal(1e-4)):
    """A_t = Σ over the steps of the row that end at or after t of (r_step - mean R) / (s + eps), R = the rewards of all
    steps of the group."""
    value = []
    for start in range(0, len(step_ends), group_size):
        steps = [(b, t) for b, t in cells(step_ends) if start <= b < start + group_size]
        normalised = dict(zip(steps, group_scaled([step_rewards[b][t] for b, t in steps], eps), strict=True))
        for b in range(start, start + group_size):
            own = {end: advantage for (row, end), advantage in normalised.items() if row == b}
            value.append([total(a for end, a in own.items() if end >= t) for t in range(len(step_ends[b]))])
    return {"value": value}


def kl_part(ratio, x, kind):
    """(estimate of KL(π||π_ref), slope in log π) of one token; x = log π - log π_ref, ratio = π / π_old."""
    k3_value = exp(-x) + x - 1
    return {
        "k1": (x, ONE),
        "k2": (x * x / 2, x),
        "k3": (k3_value, 1 - exp(-x)),
        "k3_weighted": (ratio * k3_value, ratio * x),  # r k3 + r (1 - e^(-x)) = r x
    }[kind]


@vectors(
    "minirl.algorithms.grpo", SCHULMAN + "; k3: Shao et al. 2024, eq. 4",
    constants=["old_logprobs", "ref_logprobs"],
)
def kl_in_loss(logprobs, old_logprobs, ref_logprobs, kind="k3", cotangent=None):
    """With x = log π - log π_ref and r = π / π_old: k1 x (slope 1), k2 x^2/2 (x), k3 e^(-x) + x - 1 (1 - e^(-x)),
    k3_weighted r (e^(-x) + x - 1) (r x)."""
    parts = {
        (b, t): kl_part(exp(logprobs[b][t] - old_logprobs[b][t]), logprobs[b][t] - ref_logprobs[b][t], kind)
        for b, t in cells(everywhere(logprobs))
    }
    gradient = {(b, t): cotangent[b][t] * slope for (b, t), (_, slope) in parts.items()}
    return {
        "value": grid(logprobs, {cell: value for cell, (value, _) in parts.items()}),
        "gradients": {"logprobs": grid(logprobs, gradient)},
    }


@vectors(
    "minirl.algorithms.grpo", "Shao et al. 2024, eqs. 3 and 4; token: Yu et al. 2025; constant: Liu et al. 2025",
    constants=["old_logprobs", "ref_logprobs", "advantages"],
    conventions="a row without tokens counts as a row of loss 0; normalizer_length defaults to T; kl_policy_ref is the "
    "mean of k3 over tokens, 0 without reference",
)
def grpo_loss(
    logprobs, old_logprobs, ref_logprobs, advantages, mask,
    clip=Decimal(0.2), beta=ZERO, reduction="sequence", normalizer_length=None, kl="k3",
):  # fmt: skip
    """L = -Σ_mask w_i (min(r A, clip(r) A) - β KL), w_i = 1/(B |o_i|) (sequence), 1/Σ|o_i| (token) or
    1/(B · normalizer_length) (constant). d/d log π = -w_i (r A or 0 where clipped, minus β times the slope of KL)."""
    ratio = ratios(logprobs, old_logprobs, mask)
    lengths, rows = [sum(map(bool, row)) for row in mask], len(mask)
    loss, gradient, divergence = ZERO, {}, ZERO
    for (b, t), r in ratio.items():
        divisor = {
            "sequence": rows * lengths[b],
            "token": sum(lengths),
            "constant": rows * (normalizer_length or len(mask[0])),
        }[reduction]
        surrogate, slope = clipped(r, advantages[b][t] if isinstance(advantages[b], list) else advantages[b], clip)
        penalty, penalty_slope = ZERO, ZERO
        if ref_logprobs is not None:
            x = logprobs[b][t] - ref_logprobs[b][t]
            divergence += (exp(-x) + x - 1) / sum(lengths)
            penalty, penalty_slope = kl_part(r, x, kl)
        loss -= (surrogate - beta * penalty) / divisor
        gradient[b, t] = -(r * slope - beta * penalty_slope) / divisor
    stats = {"policy_loss": loss} | ratio_stats(ratio, *bounds(clip)) | {"kl_policy_ref": divergence}
    stats["count"] = sum(lengths) if reduction == "token" else rows
    return {"value": loss, "stats": stats, "gradients": {"logprobs": grid(mask, gradient)}}


# --- algorithms/reward_model.py, algorithms/dpo.py, algorithms/orpo.py


def softplus(x):
    """log(1 + e^x) = -log σ(-x); its slope is σ(x)."""
    return log(1 + exp(x))


def sigmoid(x):
    """1 / (1 + e^(-x))."""
    return 1 / (1 + exp(-x))


def mean(numbers):
    """Σ x / B of a list."""
    return total(numbers) / len(numbers)


def wins(differences):
    """Share of positive differences; a tie is half."""
    return mean([Decimal(1 + (d > 0) - (d < 0)) / 2 for d in differences])


@vectors(
    "minirl.algorithms.reward_model",
    "Ouyang et al. 2022, eq. 1; margin: Touvron et al. 2023 (Llama 2), eq. 2; centering: Eisenstein et al. 2023",
    constants=["margin"], conventions="accuracy leaves the margin out and counts a tie as half; stats are means",
)
def bradley_terry_loss(chosen_scores, rejected_scores, margin=None, centering=ZERO):
    """With d = r_w - r_l - m: L = (1/B) Σ (log(1 + e^(-d)) + c (r_w + r_l)^2). d/dr_w = (-σ(-d) + 2c (r_w + r_l)) / B,
    d/dr_l = (σ(-d) + 2c (r_w + r_l)) / B."""
    pairs = list(zip(chosen_scores, rejected_scores, strict=True))
    loss, gradients = ZERO, {"chosen_scores": [], "rejected_scores": []}
    for (w, o), m in zip(pairs, margin or [ZERO] * len(pairs), strict=True):
        loss += (softplus(o - w + m) + centering * (w + o) ** 2) / len(pairs)
        gradients["chosen_scores"].append((2 * centering * (w + o) - sigmoid(o - w + m)) / len(pairs))
        gradients["rejected_scores"].append((2 * centering * (w + o) + sigmoid(o - w + m)) / len(pairs))
    differences = [w - o for w, o in pairs]
    stats = {
        "loss": loss, "accuracy": wins(differences), "margin": mean(differences),
        "score_mean": mean(chosen_scores + rejected_scores), "count": len(pairs),
    }  # fmt: skip
    return {"value": loss, "stats": stats, "gradients": gradients}


@vectors(
    "minirl.algorithms.segment_reward", "Christiano et al. 2017, section 2.2.3", constants=["mu"],
    conventions="noise is the share of answers that are a coin's; accuracy takes mu where the first sum is larger, "
                "1 - mu where it is smaller, and half for a tie",
)  # fmt: skip
def segment_preference_loss(chosen_sums, other_sums, mu, noise=Decimal("0.1")):
    """With d = s_1 - s_2, P = (1 - n) σ(d) + n/2, Q = 1 - P: L = -(1/N) Σ (μ ln P + (1 - μ) ln Q).
    dL/ds_1 = -((μ / P - (1 - μ) / Q) (1 - n) σ(d) σ(-d)) / N = -dL/ds_2."""
    rows = list(zip(chosen_sums, other_sums, mu, strict=True))
    loss, gradients, right = ZERO, {"chosen_sums": [], "other_sums": []}, []
    for first, second, m in rows:
        d = first - second
        p = (1 - noise) * sigmoid(d) + noise / 2
        loss -= (m * log(p) + (1 - m) * log(1 - p)) / len(rows)
        slope = (m / p - (1 - m) / (1 - p)) * (1 - noise) * sigmoid(d) * sigmoid(-d) / len(rows)
        gradients["chosen_sums"].append(-slope)
        gradients["other_sums"].append(slope)
        right.append(m if d > 0 else 1 - m if d < 0 else Decimal("0.5"))
    return {"value": loss, "stats": {"loss": loss, "accuracy": mean(right), "count": len(rows)}, "gradients": gradients}


@vectors(
    "minirl.algorithms.dpo", "Rafailov et al. 2023, eq. 7; label smoothing: Mitchell 2023 (cDPO), eq. 3",
    constants=["ref_chosen_logprobs", "ref_rejected_logprobs"],
    conventions="log-probabilities summed over the answer; accuracy counts a tie as half; stats are means",
)
def dpo_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs,
    beta=Decimal(0.1), label_smoothing=ZERO,
):  # fmt: skip
    """With h = β (log π_w/π_l - log π_ref,w/π_ref,l): L = (1/B) Σ ((1 - ε) log(1 + e^(-h)) + ε log(1 + e^h)).
    d/d log π_w = -β (1 - ε - σ(h)) / B = -d/d log π_l."""
    rewards = [
        [beta * (logp - ref) for logp, ref in zip(*side, strict=True)]
        for side in ((chosen_logprobs, ref_chosen_logprobs), (rejected_logprobs, ref_rejected_logprobs))
    ]
    margins = [w - o for w, o in zip(*rewards, strict=True)]
    loss = mean([(1 - label_smoothing) * softplus(-h) + label_smoothing * softplus(h) for h in margins])
    slope = [-beta * (1 - label_smoothing - sigmoid(h)) / len(margins) for h in margins]
    stats = {
        "loss": loss, "accuracy": wins(margins), "chosen_reward": mean(rewards[0]), "rejected_reward": mean(rewards[1]),
        "margin": mean(margins), "chosen_logprob": mean(chosen_logprobs), "rejected_logprob": mean(rejected_logprobs),
        "count": len(margins),
    }  # fmt: skip
    return {
        "value": loss, "stats": stats,
        "gradients": {"chosen_logprobs": slope, "rejected_logprobs": [-s for s in slope]},
    }  # fmt: skip


CERTAIN = Decimal(-1e-12)


def odds_of(logp):
    """(log odds, slope) of log P: log P - log(1 - P), slope 1 / (1 - P); from -1e-12 on a constant."""
    x = min(logp, CERTAIN)
    return x - log(1 - exp(x)), ZERO if logp > CERTAIN else 1 / (1 - exp(x))


@vectors(
    "minirl.algorithms.orpo", "Hong et al. 2024, eq. 4",
    conventions="log P above -1e-12 is read as -1e-12, with gradient 0",
)
def log_odds(mean_logprobs, cotangent=None):
    """log P - log(1 - P). d/d log P = cotangent / (1 - P)."""
    value = [odds_of(logp)[0] for logp in mean_logprobs]
    if cotangent is None:
        return {"value": value}
    gradient = [weight * odds_of(logp)[1] for logp, weight in zip(mean_logprobs, cotangent, strict=True)]
    return {"value": value, "gradients": {"mean_logprobs": gradient}}


@vectors(
    "minirl.algorithms.orpo", "Hong et al. 2024, eqs. 6 and 7",
    conventions="log P is the mean over the answer's tokens, capped as in log_odds; the likelihood is a mean over rows "
    "and not over tokens; accuracy counts a tie as half; stats are means",
)
def orpo_loss(chosen_mean_logprobs, rejected_mean_logprobs, chosen_nll, lam=Decimal(0.1)):
    """With z = log odds_w - log odds_l: L = (1/B) Σ (NLL + λ log(1 + e^(-z))). d/d log P_w = -λ σ(-z) / (1 - P_w) / B,
    d/d log P_l = λ σ(-z) / (1 - P_l) / B, d/d NLL = 1/B."""
    count = len(chosen_nll)
    odds = [[odds_of(logp) for logp in side] for side in (chosen_mean_logprobs, rejected_mean_logprobs)]
    ratio = [w - o for (w, _), (o, _) in zip(*odds, strict=True)]
    gradients = {
        "chosen_mean_logprobs": [-lam * sigmoid(-z) * s / count for z, (_, s) in zip(ratio, odds[0], strict=True)],
        "rejected_mean_logprobs": [lam * sigmoid(-z) * s / count for z, (_, s) in zip(ratio, odds[1], strict=True)],
        "chosen_nll": [ONE / count] * count,
    }
    odds_loss = mean([softplus(-z) for z in ratio])
    loss = mean(chosen_nll) + lam * odds_loss
    stats = {
        "loss": loss, "nll": mean(chosen_nll), "odds_loss": odds_loss, "log_odds_ratio": mean(ratio),
        "accuracy": wins(ratio), "chosen_logprob": mean(chosen_mean_logprobs),
        "rejected_logprob": mean(rejected_mean_logprobs), "count": count,
    }  # fmt: skip
    return {"value": loss, "stats": stats, "gradients": gradients}


# --- algorithms/q_sharp.py


@vectors(
    "minirl.algorithms.q_sharp", "Zhou et al. 2025 (Q#), section 2",
    conventions="a probability of 0 has gradient 0 in minirl, and none is given here",
)
def optimal_q(probs, support, eta, cotangent=None):
    """Q = η log Σ_k p_k e^(z_k / η). d/dp_k = cotangent η e^(z_k / η) / Σ_j p_j e^(z_j / η)."""
    tilt = [exp(z / eta) for z in support]
    sums = [dot(row, tilt) for row in probs]
    out = {"value": [eta * log(s) for s in sums]}
    if all(p for row in probs for p in row):
        gradient = [[weight * eta * t / s for t in tilt] for s, weight in zip(sums, cotangent, strict=True)]
        out["gradients"] = {"probs": gradient}
    return out


def hat(value, support):
    """The share of a mass at `value` that each grid point gets."""
    value = min(max(value, support[0]), support[-1])
    shares = [ZERO] * len(support)
    for j in range(len(support) - 1):
        if support[j] <= value <= support[j + 1]:
            shares[j + 1] = (value - support[j]) / (support[j + 1] - support[j])
            shares[j] = ONE - shares[j + 1]
    return shares


@vectors(
    "minirl.algorithms.q_sharp", "Bellemare et al. 2017, eq. 7",
    conventions="the grid may be uneven: a value is laid between its two neighbours",
)
def project_to_support(probs, values, support, cotangent=None):
    """Each mass p at v, moved to the nearest end where it lies outside, gives p (z_{j+1} - v) / (z_{j+1} - z_j) to z_j
    and the rest to z_{j+1}, its neighbours. d/dp = Σ_j cotangent_j · share_j."""
    shares = [[hat(v, support) for v in row] for row in values]
    value = [
        [total(p * share[j] for p, share in zip(row, part, strict=True)) for j in range(len(support))]
        for row, part in zip(probs, shares, strict=True)
    ]
    gradient = [[dot(weight, share) for share in part] for weight, part in zip(cotangent, shares, strict=True)]
    return {"value": value, "gradients": {"probs": gradient}}


@vectors(
    "minirl.algorithms.q_sharp", "Zhou et al. 2025 (Q#), algorithm 1", constants=["outcomes"],
    conventions="one mean over all steps of the mask; stats are means over them",
)
def outcome_loss(log_probs, outcomes, support, mask):
    """L = -(1/N) Σ_mask Σ_k t_k log p_k with t the row's outcome laid on the grid. d/d log p_k = -t_k / N."""
    inside = cells(mask)
    count = max(len(inside), 1)
    targets = [hat(outcome, support) for outcome in outcomes]
    gradient = [[[ZERO] * len(support) for _ in row] for row in log_probs]
    for b, t in inside:
        gradient[b][t] = [-share / count for share in targets[b]]
    loss = -total(dot(targets[b], log_probs[b][t]) for b, t in inside) / count
    stats = {
        "loss": loss,
        "outcome_mean": total(outcomes[b] for b, _ in inside) / count,
        "predicted_mean": total(dot([exp(logp) for logp in log_probs[b][t]], support) for b, t in inside) / count,
        "count": len(inside),
    }
    return {"value": loss, "stats": stats, "gradients": {"log_probs": gradient}}


@vectors(
    "minirl.algorithms.q_sharp", "Zhou et al. 2025 (Q#), section 2",
    conventions="shifted so that the action of the largest q keeps its logit; else compare softmaxes",
)
def guided_logits(logits, q, eta, cotangent=None):
    """y_a = logit_a + (q_a - q_m) / η with m = argmax q. d/d logit_a = g_a, the cotangent; d/dq_a = (g_a - 1[a = m]
    Σ_b g_b) / η."""
    value, gradient = [], []
    for row, scores, weight in zip(logits, q, cotangent, strict=True):
        best = scores.index(max(scores))
        value.append([logit + (score - scores[best]) / eta for logit, score in zip(row, scores, strict=True)])
        gradient.append([(g - (total(weight) if a == best else ZERO)) / eta for a, g in enumerate(weight)])
    return {"value": value, "gradients": {"logits": cotangent, "q": gradient}}
