use burn::{
    backend::Dispatch,
    tensor::{DType, Tensor},
};

use super::project::{check, check_output};
use crate::{
    Activations, Error, Fused, FusedInputs, FusedPlan, MaybeFloat, PackedLayout, PackedMatrix,
    PartWords, Result, WeightOps, error::invalid, fused::MOST_PARTS,
};

/// Computes products with stacked matrices and fused operations around them, in this order: norm of
/// `x`, products, bias, gate, residual. Gradients flow to all float tensors, not to the weights.
///
/// On WGPU and CUDA, up to 32 rows of `x` and up to three matrices of one format take one launch.
/// With a gate, that holds for one matrix or two of equal size. Other arguments take one launch for
/// each run of up to three matrices of the same format. On other backends, the operations are
/// separate, except that a product with several matrices of one format is a single operation, and
/// includes the gate if there is no bias.
///
/// # Shapes
/// - `x`: `[batch, seq, columns]`, f32
/// - `parts`: at least one, `[rows_i, columns]`; `rows` is the sum of all `rows_i`
/// - output: `[batch, seq, rows]`, with a gate `[batch, seq, rows / 2]`, f32
///
/// ```
/// use burn::tensor::{Bytes, Distribution, Tensor};
/// use kv_weights::{Activations, Fused, Gate, Norm, PackedMatrix, WeightFormat, project_fused};
///
/// let device = burn::tensor::Device::flex();
/// // Gate and up: 96 rows each, of two blocks of 18 bytes.
/// let matrix = || {
///     let blocks = Bytes::from_bytes_vec(vec![0x21; 96 * 2 * 18]);
///     PackedMatrix::from_bytes(blocks, WeightFormat::Q4_0, [96, 64], &device)
/// };
/// let (gate, up) = (matrix()?, matrix()?);
/// let x = Tensor::<3>::random([1, 1, 64], Distribution::Default, &device);
/// let norm = Norm::new(Tensor::ones([64], &device), 1e-5);
/// let fused = Fused::default().with_norm(norm).with_gate(Gate::Silu);
/// let y = project_fused(x, &[&gate, &up], Activations::Exact, fused)?;
/// assert_eq!(y.dims(), [1, 1, 96]);
/// # Ok::<(), kv_weights::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] for shapes that do not match. [`Error::Invalid`] for no parts, or for an odd
/// number of rows with a gate. [`Error::Unsupported`] for another type than f32 or for a device
/// without the operation.
pub fn project_fused(
    x: Tensor<3>,
    parts: &[&PackedMatrix],
    activations: Activations,
    fused: Fused,
) -> Result<Tensor<3>> {
    if parts.is_empty() {
        return Err(invalid("parts", 0, "must be one matrix or more"));
    }
    for part in parts {
        check("project_fused", &x, part)?;
    }
    let [batch, seq, columns] = x.dims();
    let rows: usize = parts.iter().map(|part| part.dims()[0]).sum();
    let outputs = match fused.gate {
        Some(_) if !rows.is_multiple_of(2) => {
            return Err(invalid("rows", rows, "must be even, half of them for the gate"));
        }
        Some(_) => rows / 2,
        None => rows,
    };
    check_shapes(&fused, [batch, seq, columns], rows, outputs)?;
    let n = batch * seq;
    if n == 0 {
        return Ok(Tensor::zeros([batch, seq, outputs], (&x.device(), DType::F32)));
    }
    check_output("project_fused", n, rows, &x.device())?;
    let x = x.reshape([n, columns]);
    let residual = fused.residual.clone().map(|residual| residual.reshape([n, outputs]));
    let layouts: Vec<_> = parts.iter().map(|part| part.layout()).collect();
    let y = if fused.gate.is_none() || one_launch(&layouts) {
        joined(&x, parts, activations, &fused, residual)
    } else {
        // The halves of the rows differ in format, or a half is not in one matrix.
        let products = Fused { gate: None, ..fused.clone() };
        let y = joined(&x, parts, activations, &products, None);
        let y = match fused.gate {
            Some(gate) => <Dispatch as WeightOps>::packed_gate(y.into_dispatch(), gate),
            None => y.into_dispatch(),
        };
        let y = Tensor::<2>::from_dispatch(y);
        match residual {
            Some(residual) => y + residual,
            None => y,
        }
    };
    Ok(y.reshape([batch, seq, outputs]))
}

/// Returns whether one launch can gate these: both halves are in one matrix, or each is one matrix.
fn one_launch(parts: &[PackedLayout]) -> bool {
    match parts {
        [_] => true,
        [gate, up] => gate == up,
        _ => false,
    }
}

/// Runs the operation once for each run of matrices of the same format and joins the results. With
/// a gate, all matrices are one run.
fn joined(
    x: &Tensor<2>,
    parts: &[&PackedMatrix],
    activations: Activations,
    fused: &Fused,
    residual: Option<Tensor<2>>,
) -> Tensor<2> {
    let mut runs: Vec<&[&PackedMatrix]> = vec![];
    for same in parts.chunk_by(|a, b| a.format() == b.format()) {
        runs.extend(same.chunks(MOST_PARTS));
    }
    if let [all] = runs[..] {
        return run(x.clone(), all, activations, fused, fused.bias.clone(), residual);
    }
    let mut start = 0;
    let products = runs.into_iter().map(|parts| {
        let rows = parts.iter().map(|part| part.dims()[0]).sum();
        let bias = fused.bias.clone().map(|bias| bias.narrow(0, start, rows));
        let residual = residual.clone().map(|residual| residual.narrow(1, start, rows));
        start += rows;
        run(x.clone(), parts, activations, fused, bias, residual)
    });
    Tensor::cat(products.collect(), 1)
}

/// Runs the operation with matrices of one format.
fn run(
    x: Tensor<2>,
    parts: &[&PackedMatrix],
    activations: Activations,
    fused: &Fused,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<2>>,
) -> Tensor<2> {
    let words = |part: &PackedMatrix| part.words().clone().into_dispatch();
    let words: PartWords<Dispatch> = match parts {
        [a] => PartWords::One(words(a)),
        [a, b] => PartWords::Two(words(a), words(b)),
        [a, b, c, ..] => PartWords::Three(words(a), words(b), words(c)),
        [] => return x,
    };
    let norm = fused.norm.as_ref();
    let plan = FusedPlan {
        parts: parts.iter().map(|part| part.layout()).collect(),
        activations,
        gate: fused.gate,
        epsilon: norm.map_or(0.0, |norm| norm.epsilon),
        plus_one: norm.is_some_and(|norm| norm.plus_one),
    };
    let gains = norm.map(|norm| norm.gains.clone().into_dispatch());
    let inputs = FusedInputs {
        words,
        norm: MaybeFloat::from(gains),
        bias: MaybeFloat::from(bias.map(Tensor::into_dispatch)),
        residual: MaybeFloat::from(residual.map(Tensor::into_dispatch)),
    };
    let y = <Dispatch as WeightOps>::packed_fused(x.into_dispatch(), inputs, plan);
    Tensor::from_dispatch(y)
}

fn check_shapes(fused: &Fused, x: [usize; 3], rows: usize, outputs: usize) -> Result<()> {
    let [batch, seq, columns] = x;
    let gains = fused.norm.as_ref().map(|norm| &norm.gains);
    let tensors = [
        ("gains", gains.map(shape_and_dtype), vec![columns]),
        ("bias", fused.bias.as_ref().map(shape_and_dtype), vec![rows]),
        ("residual", fused.residual.as_ref().map(shape_and_dtype), vec![batch, seq, outputs]),
    ];
    for (tensor, found, expected) in tensors {
        let Some((shape, dtype)) = found else { continue };
        if shape != expected {
            let rule = format!("must be {expected:?}");
            return Err(Error::Shape { op: "project_fused", tensor, shape, rule });
        }
        if dtype != DType::F32 {
            return Err(Error::Unsupported {
                what: format!("project_fused: {tensor} of type {dtype:?}"),
                why: "it is computed in f32; cast it first".into(),
            });
        }
    }
    Ok(())
}

fn shape_and_dtype<const D: usize>(tensor: &Tensor<D>) -> (Vec<usize>, DType) {
    (tensor.dims().to_vec(), tensor.dtype())
}
