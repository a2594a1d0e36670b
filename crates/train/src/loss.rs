//! Losses over a vocabulary without keeping the logits.
//!
//! One block of rows is processed at a time, and the gradients with respect to hidden states and
//! head weights are computed by hand in the same pass. The logits of a long text and a large
//! vocabulary are the largest tensors of a training step, and an autodiff graph would hold several
//! of them. The idea is that of Cut Cross-Entropy (Wijmans et al., 2024,
//! <https://arxiv.org/abs/2411.09009>).

use burn::tensor::{IndexingUpdateOp, Int, Tensor, activation::log_softmax};
use kv_models::nn::Matrix;
use rayon::prelude::*;

use crate::Objective;

/// Number of rows whose logits are in memory at once.
const ROWS: usize = 128;

/// Hidden states and the weights that turn them into logits.
#[derive(Clone)]
pub(crate) struct Head {
    /// `[rows, hidden]`.
    pub(crate) hidden: Tensor<2>,
    /// `[vocab, hidden]`.
    pub(crate) weight: Matrix,
    /// The bound of the logits; see [`kv_models::Decoder::logit_softcap`].
    pub(crate) softcap: Option<f64>,
}

/// Sums over rows, in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    /// Negative log-likelihood of the targets.
    pub(crate) nll: f64,
    /// Kullback-Leibler divergence of the student's distribution from the teacher's.
    pub(crate) kl: f64,
    /// Divergence of the attention of all layers from their indexers.
    pub(crate) index: f64,
    pub(crate) rows: usize,
}

impl Sums {
    pub(crate) fn add(&mut self, other: Self) {
        self.nll += other.nll;
        self.kl += other.kl;
        self.index += other.index;
        self.rows += other.rows;
    }
}

/// Gradients of the objective, times a factor.
pub(crate) struct HeadGrads {
    /// `[rows, hidden]`.
    pub(crate) hidden: Tensor<2>,
    /// `[vocab, hidden]`; `None` if the head is not trained.
    pub(crate) weight: Option<Tensor<2>>,
}

/// Loss sums of `student` against `targets` `[rows]` and against `teacher`'s distribution.
pub(crate) fn losses(student: &Head, teacher: Option<&Head>, targets: &Tensor<1, Int>) -> Sums {
    over_blocks(student, teacher, targets, |block| block.sums).into_iter().fold(
        Sums::default(),
        |mut all, sums| {
            all.add(sums);
            all
        },
    )
}

/// Returns [`losses`] and the gradients of `factor * sum over rows of objective`.
pub(crate) fn gradients(
    student: &Head,
    teacher: Option<&Head>,
    targets: &Tensor<1, Int>,
    objective: Objective,
    factor: f64,
    train_weight: bool,
) -> (Sums, HeadGrads) {
    let (ce, kl) = objective.weights();
    let blocks = over_blocks(student, teacher, targets, |block| {
        // d CE = p - onehot(target), d KL = p - p_teacher; both times the weight of the loss.
        let p = block.log_p.exp();
        let target = block.targets.unsqueeze_dim::<2>(1);
        let minus_ce = Tensor::full(target.shape(), -ce, &p.device());
        let d_logits = p.mul_scalar(ce + kl).scatter(1, target, minus_ce, IndexingUpdateOp::Add);
        let d_logits = match block.teacher_p {
            Some(teacher) if kl != 0.0 => d_logits - teacher.mul_scalar(kl),
            _ => d_logits,
        };
        let d_logits = match block.slope {
            Some(slope) => d_logits * slope,
            None => d_logits,
        };
        let d_logits = d_logits.mul_scalar(factor);
        let weight = train_weight.then(|| d_logits.clone().transpose().matmul(block.hidden));
        let hidden = student.weight.back_project(d_logits.unsqueeze_dim(0)).squeeze_dim(0);
        (block.sums, hidden, weight)
    });
    let mut sums = Sums::default();
    let (mut hidden, mut weight) = (Vec::with_capacity(blocks.len()), None::<Tensor<2>>);
    for (block_sums, block_hidden, block_weight) in blocks {
        sums.add(block_sums);
        hidden.push(block_hidden);
        weight = match (weight, block_weight) {
            (Some(sum), Some(more)) => Some(sum + more),
            (sum, more) => sum.or(more),
        };
    }
    (sums, HeadGrads { hidden: Tensor::cat(hidden, 0), weight })
}

/// One block of rows: its log-probabilities and loss sums.
struct Block {
    hidden: Tensor<2>,
    targets: Tensor<1, Int>,
    log_p: Tensor<2>,
    /// The derivative of bounded logits by the products with the head.
    slope: Option<Tensor<2>>,
    teacher_p: Option<Tensor<2>>,
    sums: Sums,
}

/// Applies `f` to every block of rows and returns the results in order; on the CPU, several blocks
/// run at a time.
fn over_blocks<R: Send>(
    student: &Head,
    teacher: Option<&Head>,
    targets: &Tensor<1, Int>,
    f: impl Fn(Block) -> R + Sync,
) -> Vec<R> {
    let [rows, _] = student.hidden.dims();
    let block = |start: usize| {
        let len = ROWS.min(rows - start);
        let hidden = student.hidden.clone().narrow(0, start, len);
        let targets = targets.clone().narrow(0, start, len);
        let (log_p, slope) = log_probabilities(hidden.clone(), student);
        let picked = log_p.clone().gather(1, targets.clone().unsqueeze_dim(1));
        let nll = -picked.sum().into_scalar::<f64>();
        let (mut kl, mut teacher_p) = (0.0, None);
        if let Some(teacher) = teacher {
            let hidden = teacher.hidden.clone().narrow(0, start, len);
            let (teacher_log_p, _) = log_probabilities(hidden, teacher);
            let p = teacher_log_p.clone().exp();
            kl = (p.clone() * (teacher_log_p - log_p.clone())).sum().into_scalar::<f64>();
            teacher_p = Some(p);
        }
        f(Block {
            hidden,
            targets,
            log_p,
            slope,
            teacher_p,
            sums: Sums { nll, kl, index: 0.0, rows: len },
        })
    };
    let starts = (0..rows).step_by(ROWS);
    if crate::step::on_threads(&student.hidden.device()) {
        starts.collect::<Vec<_>>().into_par_iter().map(block).collect()
    } else {
        starts.map(block).collect()
    }
}

/// Returns log-probabilities, and the derivative of the logits if they are bounded.
fn log_probabilities(hidden: Tensor<2>, head: &Head) -> (Tensor<2>, Option<Tensor<2>>) {
    let logits = head.weight.project(hidden.unsqueeze_dim::<3>(0)).squeeze_dim::<2>(0);
    let Some(cap) = head.softcap else { return (log_softmax(logits, 1), None) };
    let bounded = logits.div_scalar(cap).tanh();
    let slope = bounded.clone().square().neg().add_scalar(1.0);
    (log_softmax(bounded.mul_scalar(cap), 1), Some(slope))
}

#[cfg(all(test, feature = "flex"))]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use burn::{
        module::Param,
        tensor::{Distribution, TensorData},
    };
    use kv_models::kv_cubecl::{Autodiff, Flex, On};

    use super::*;

    /// Losses and gradients of the objective as one autodiff graph over all logits.
    fn composed(
        student: &Head,
        teacher: &Head,
        targets: &Tensor<1, Int>,
        objective: Objective,
        factor: f64,
    ) -> (f64, f64, Tensor<2>, Tensor<2>) {
        let hidden = student.hidden.clone().autodiff().require_grad();
        let weight = student.weight.val().autodiff().require_grad();
        let log_p = |hidden: Tensor<2>, weight: Tensor<2>| {
            let logits = hidden.matmul(weight.transpose());
            log_softmax(kv_models::nn::soft_capped(logits, student.softcap), 1)
        };
        let teacher = log_p(teacher.hidden.clone(), teacher.weight.val()).autodiff();
        let log_p = log_p(hidden.clone(), weight.clone());
        let picked = log_p.clone().gather(1, targets.clone().unsqueeze_dim(1).autodiff());
        let nll = picked.sum().neg();
        let kl = (teacher.clone().exp() * (teacher - log_p)).sum();
        let (ce, weight_kl) = objective.weights();
        let loss =
            (nll.clone().mul_scalar(ce) + kl.clone().mul_scalar(weight_kl)).mul_scalar(factor);
        let grads = loss.backward();
        (
            nll.into_scalar::<f64>(),
            kl.into_scalar::<f64>(),
            hidden.grad(&grads).unwrap(),
            weight.grad(&grads).unwrap(),
        )
    }

    fn close(name: &str, got: Tensor<2>, expected: Tensor<2>) {
        let scale = expected.clone().abs().max().into_scalar::<f64>();
        let error = (got - expected).abs().max().into_scalar::<f64>();
        // Sums of some hundred f32 products.
        assert!(error <= 1e-5 * scale, "{name}: {error} of {scale}");
    }

    #[test]
    fn by_hand_as_by_autodiff() {
        let device = (*On::<Autodiff<Flex>>::open().unwrap()).clone().without_autodiff();
        // More rows than one block, not a multiple of it.
        let (rows, width, vocab) = (2 * ROWS + 17, 24, 53);
        let dense = |tensor| Matrix::from(Param::from_tensor(tensor));
        let random =
            |shape, std| Tensor::<2>::random(shape, Distribution::Normal(0.0, std), &device);
        let head = |softcap| Head {
            hidden: random([rows, width], 1.0),
            weight: dense(random([vocab, width], 0.3)),
            softcap,
        };
        let ids: Vec<i32> = (0..rows as i32).map(|row| row * 7 % vocab as i32).collect();
        let targets = Tensor::<1, Int>::from_data(TensorData::new(ids, [rows]), &device);
        let objectives =
            [Objective::CrossEntropy, Objective::Distillation, Objective::Mixed { kl_weight: 0.3 }];
        for (softcap, objective) in
            [None, Some(1.5)].into_iter().flat_map(|cap| objectives.map(|it| (cap, it)))
        {
            let (student, teacher) = (head(softcap), head(softcap));
            let factor = 0.25;
            let (nll, kl, hidden, weight) =
                composed(&student, &teacher, &targets, objective, factor);
            let (sums, grads) =
                gradients(&student, Some(&teacher), &targets, objective, factor, true);
            assert_eq!(sums.rows, rows);
            assert!((sums.nll - nll).abs() < 1e-5 * nll, "{} against {nll}", sums.nll);
            assert!((sums.kl - kl).abs() < 1e-5 * kl, "{} against {kl}", sums.kl);
            assert_eq!(losses(&student, Some(&teacher), &targets), sums);
            close("hidden", grads.hidden, hidden);
            close("weight", grads.weight.unwrap(), weight);
        }
        let student = head(None);
        let same = losses(&student, Some(&student), &targets);
        assert!(same.kl.abs() < 1e-3, "a model does not diverge from itself: {}", same.kl);
    }
}
