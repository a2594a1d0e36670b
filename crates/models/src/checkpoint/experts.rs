//! Tensors that hold a matrix for each expert of a mixture.

use burn::{
    module::Param,
    tensor::{Bytes, DType, Tensor, TensorData},
};
use kv_weights::{PackedExperts, PackedLayout, PackedMatrix, WeightFormat, largest_buffer};

use super::{mapped::Mapped, packed::reads_mapped, weights::Weights};
use crate::{
    error::{Error, Result},
    mxfp4::{self, BLOCK},
    nn::{ExpertStack, ExpertStacks, Linear, Matrix},
};

/// The rows of one projection of an expert.
pub(crate) struct ExpertRows {
    numbers: Numbers,
    bias: Option<Vec<f32>>,
    /// `[rows, columns]`.
    shape: [usize; 2],
}

enum Numbers {
    Floats(Vec<f32>),
    Packed(Vec<Part>),
}

struct Part {
    format: WeightFormat,
    rows: usize,
    blocks: Blocks,
}

enum Blocks {
    Held(Vec<u8>),
    InFile(Mapped),
}

impl Blocks {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Held(bytes) => bytes,
            Self::InFile(mapped) => mapped.bytes(),
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Self::Held(bytes) => Bytes::from_bytes_vec(bytes),
            Self::InFile(mapped) => mapped.shared(),
        }
    }
}

impl ExpertRows {
    /// Returns the blocks of one part of the rows, if they are packed.
    fn part(&self, index: usize) -> Option<&Blocks> {
        match &self.numbers {
            Numbers::Packed(parts) => parts.get(index).map(|part| &part.blocks),
            Numbers::Floats(_) => None,
        }
    }

    /// Puts even rows first, then odd ones.
    pub(crate) fn split(self) -> Self {
        let numbers = match self.numbers {
            Numbers::Floats(values) => Numbers::Floats(even_then_odd(&values, self.shape[1])),
            Numbers::Packed(parts) => {
                let split = |Part { format, rows, blocks }| {
                    let bytes = blocks.bytes();
                    let split = even_then_odd(bytes, bytes.len() / rows);
                    Part { format, rows, blocks: Blocks::Held(split) }
                };
                Numbers::Packed(parts.into_iter().map(split).collect())
            }
        };
        Self { numbers, bias: self.bias.map(|bias| even_then_odd(&bias, 1)), ..self }
    }

    /// Appends the rows of `other`; `None` if only one of both is packed, or has a bias.
    fn then(mut self, other: Self) -> Option<Self> {
        match (&mut self.numbers, other.numbers) {
            (Numbers::Floats(values), Numbers::Floats(more)) => values.extend(more),
            (Numbers::Packed(parts), Numbers::Packed(more)) => parts.extend(more),
            _ => return None,
        }
        match (&mut self.bias, other.bias) {
            (Some(bias), Some(more)) => bias.extend(more),
            (None, None) => {}
            _ => return None,
        }
        self.shape[0] += other.shape[0];
        Some(self)
    }
}

/// Returns rows 0, 2, 4, .. of `width` elements each, then rows 1, 3, 5, ..
fn even_then_odd<T: Copy>(values: &[T], width: usize) -> Vec<T> {
    let rows = |first: usize| values.chunks_exact(width).skip(first).step_by(2).flatten();
    rows(0).chain(rows(1)).copied().collect()
}

/// Returns the range of a file that holds these blocks, each next to the last.
fn in_file<'a>(blocks: impl IntoIterator<Item = &'a Blocks>) -> Option<Mapped> {
    let mut mapped = blocks.into_iter().map(|blocks| match blocks {
        Blocks::InFile(mapped) => Some(mapped),
        Blocks::Held(_) => None,
    });
    let first = mapped.next()??.clone();
    mapped.try_fold(first, |all, next| all.then(next?))
}

/// MXFP4 blocks of Hugging Face checkpoints, with codes and scales apart.
struct Mxfp4 {
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Mxfp4 {
    /// Returns the blocks in the layout of GGUF files.
    fn gguf_blocks(&self) -> Vec<u8> {
        let blocks = self.codes.chunks_exact(BLOCK / 2).zip(&self.scales);
        blocks.flat_map(|(codes, scale)| mxfp4::gguf_block(codes, *scale)).collect()
    }
}

impl Weights {
    pub(crate) fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    /// Takes the matrices `[rows, columns]` of experts to the host, and with `bias` their biases
    /// `[rows]`. `shape` is `[experts, rows, columns]`. GGUF files have matrices of this layout.
    /// Hugging Face files have transposed floats, or MXFP4 blocks (`NAME_blocks`, `NAME_scales`)
    /// that are not transposed.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub(crate) fn experts(
        &mut self,
        name: &str,
        shape @ [n, rows, columns]: [usize; 3],
        bias: bool,
    ) -> Result<Vec<ExpertRows>> {
        if self.is_outline() {
            return self.list_experts(name, shape, bias).map(|()| vec![]);
        }
        let (weight, bias_name) = match self.is_gguf() {
            true => (format!("{name}.weight"), format!("{name}.bias")),
            false => (name.to_string(), format!("{name}_bias")),
        };
        let weights = match self.packed_experts(name, &weight, shape)? {
            Some(weights) => weights,
            None => {
                self.count_restored(&weight);
                let values = self.float_experts(name, &weight, shape)?;
                let matrices = values.chunks_exact(rows * columns);
                matrices.map(|values| Numbers::Floats(values.to_vec())).collect()
            }
        };
        let mut biases = vec![];
        if bias {
            self.read(&bias_name, &[n, rows], &mut biases)?;
        }
        let mut biases = biases.chunks_exact(rows).map(<[f32]>::to_vec);
        let expert = |numbers| ExpertRows { numbers, bias: biases.next(), shape: [rows, columns] };
        Ok(weights.into_iter().map(expert).collect())
    }

    /// Takes two [projections](Self::experts) of experts, and joins the rows of each expert.
    ///
    /// # Errors
    /// Fails as [`experts`](Self::experts) does, and if only one of them is packed.
    pub(crate) fn joined_experts(
        &mut self,
        [first, second]: [&str; 2],
        shape: [usize; 3],
        bias: bool,
    ) -> Result<Vec<ExpertRows>> {
        let rows = self.experts(first, shape, bias)?;
        let more = self.experts(second, shape, bias)?;
        let join = |(rows, more): (ExpertRows, ExpertRows)| {
            let why = || format!("has another format than the rows of {first}");
            rows.then(more).ok_or_else(|| self.flawed(second, why()))
        };
        rows.into_iter().zip(more).map(join).collect()
    }

    fn float_experts(
        &mut self,
        name: &str,
        weight: &str,
        shape @ [n, rows, columns]: [usize; 3],
    ) -> Result<Vec<f32>> {
        let mut values = vec![];
        if self.contains(&format!("{name}_blocks")) {
            values = WeightFormat::Mxfp4.restore(&self.mxfp4(name, shape)?.gguf_blocks());
        } else if self.is_gguf() {
            self.read(weight, &shape, &mut values)?;
        } else {
            let mut stored: Vec<f32> = vec![];
            self.read(weight, &[n, columns, rows], &mut stored)?;
            values.reserve_exact(stored.len());
            for expert in stored.chunks_exact(rows * columns) {
                for row in 0..rows {
                    values.extend(expert.iter().skip(row).step_by(rows));
                }
            }
        }
        Ok(values)
    }

    /// Takes the matrices as blocks, if they are stored as blocks and are to stay packed.
    fn packed_experts(
        &mut self,
        name: &str,
        weight: &str,
        shape @ [_, rows, columns]: [usize; 3],
    ) -> Result<Option<Vec<Numbers>>> {
        if self.packed.is_none() {
            return Ok(None);
        }
        if self.contains(&format!("{name}_blocks")) {
            let format = WeightFormat::Mxfp4;
            let layout = PackedLayout::new(format, [rows, columns])?;
            let bytes = self.mxfp4(name, shape)?.gguf_blocks();
            if let Some([row, column]) = layout.not_finite(&bytes) {
                let why = format!("makes numbers infinite in row {row} from {column} on");
                return Err(self.flawed(&format!("{name}_scales"), why));
            }
            let experts = bytes.chunks_exact(layout.bytes()).map(|bytes| {
                let blocks = Blocks::Held(bytes.to_vec());
                Numbers::Packed(vec![Part { format, rows, blocks }])
            });
            return Ok(Some(experts.collect()));
        }
        let found = self.tensors.get(weight).filter(|entry| entry.tensor.shape.to_vec() == shape);
        let Some(entry) = found else { return Ok(None) };
        // Hugging Face checkpoints store experts transposed.
        let found = entry.packed_at().zip(entry.packed_format()).filter(|_| self.is_gguf());
        let Some((mapped, format)) = found else { return Ok(None) };
        let layout = PackedLayout::new(format, [rows, columns])?;
        entry.check_finite(layout, mapped.bytes())?;
        let expert = |start| {
            let expert = Mapped { range: start..start + layout.bytes(), ..mapped.clone() };
            Numbers::Packed(vec![Part { format, rows, blocks: Blocks::InFile(expert) }])
        };
        let experts = mapped.range.clone().step_by(layout.bytes()).map(expert).collect();
        let bytes = entry.in_file();
        self.tensors.remove(weight);
        self.watcher.read(bytes);
        Ok(Some(experts))
    }

    fn mxfp4(&mut self, name: &str, [n, rows, columns]: [usize; 3]) -> Result<Mxfp4> {
        let per_row = columns / BLOCK;
        let codes = self.bytes(&format!("{name}_blocks"), &[n, rows, per_row, BLOCK / 2])?;
        let scales = self.bytes(&format!("{name}_scales"), &[n, rows, per_row])?;
        Ok(Mxfp4 { codes, scales })
    }

    fn bytes(&mut self, name: &str, expected: &[usize]) -> Result<Vec<u8>> {
        let entry = self.take(name, expected)?;
        let dtype = entry.tensor.dtype;
        if dtype != DType::U8 {
            return Err(entry.flawed(format!("has type {dtype:?}, but codes must be U8")));
        }
        let bytes = entry.bytes()?.to_vec();
        self.watcher.read(bytes.len());
        Ok(bytes)
    }

    /// Returns the error of a tensor that has been taken.
    pub(crate) fn flawed(&self, name: &str, why: String) -> Error {
        Error::Tensor { path: self.path.clone(), tensor: name.into(), why }
    }

    /// Returns the projections of experts, packed or as floats of the model's type. If they are
    /// packed, a stack of all of them shares their memory: a buffer of the device, or the file.
    ///
    /// # Errors
    /// Fails if the device does not multiply packed weights.
    fn linears_of(
        &mut self,
        experts: Vec<ExpertRows>,
    ) -> Result<(Vec<Linear>, Option<ExpertStack>)> {
        let parts = self.parts_of(&experts)?;
        let biases = parts.as_ref().and_then(|_| self.biases_of(&experts));
        let linears: Vec<_> = match &parts {
            Some(parts) if !reads_mapped(&self.device) => self.linears_in(experts, parts)?,
            _ => experts.into_iter().map(|rows| self.linear_of(rows)).collect::<Result<_>>()?,
        };
        let activations = self.packed.unwrap_or_default();
        let stack = parts.zip(linears.first()).map(|(parts, first)| {
            ExpertStack::new(parts, biases, activations, self.device.clone(), first.weight.id())
        });
        Ok((linears, stack))
    }

    /// Returns the [projections](Self::linears_of) of experts that are gated MLPs: for each, gate
    /// and up rows, then the output projection `down`, which is [taken](Self::experts) when the
    /// others are on the device.
    ///
    /// # Errors
    /// Fails as [`experts`](Self::experts) does, and if the device does not multiply packed
    /// weights.
    pub(crate) fn gated_experts(
        &mut self,
        gate_up: Vec<ExpertRows>,
        down: &str,
        shape: [usize; 3],
        bias: bool,
    ) -> Result<(Vec<[Linear; 2]>, Option<ExpertStacks>)> {
        let (gate_up, gate_up_stack) = self.linears_of(gate_up)?;
        let down = self.experts(down, shape, bias)?;
        let (down, down_stack) = self.linears_of(down)?;
        let experts = gate_up.into_iter().zip(down).map(<[Linear; 2]>::from).collect();
        let stacks = gate_up_stack.zip(down_stack);
        Ok((experts, stacks.map(|(gate_up, down)| ExpertStacks { gate_up, down })))
    }

    /// Puts each part of the rows of all experts into one buffer; the CPU reads them from the file.
    /// Returns `None` if the experts are not packed, have different formats, exceed a buffer, or
    /// are not next to each other in the file that the CPU reads.
    fn parts_of(&self, experts: &[ExpertRows]) -> Result<Option<Vec<PackedExperts>>> {
        let parts = |rows: &ExpertRows| match &rows.numbers {
            Numbers::Packed(parts) => Some(parts.iter().map(|p| (p.format, p.rows)).collect()),
            Numbers::Floats(_) => None,
        };
        let Some(first): Option<Vec<_>> = experts.first().and_then(parts) else { return Ok(None) };
        if experts.iter().any(|rows| parts(rows).as_ref() != Some(&first)) {
            return Ok(None);
        }
        let most = largest_buffer(&self.device).into_iter().chain(self.largest_buffer).min();
        let mut stacks = Vec::with_capacity(first.len());
        for (i, (format, rows)) in first.into_iter().enumerate() {
            let blocks = experts.iter().filter_map(|rows| rows.part(i));
            if reads_mapped(&self.device) {
                let Some(all) = in_file(blocks) else { return Ok(None) };
                let shape = [experts.len() * rows, experts[0].shape[1]];
                let all = PackedMatrix::from_bytes(all.shared(), format, shape, &self.device)?;
                match PackedExperts::from_rows(&all, experts.len()) {
                    // An expert is not a whole number of words.
                    Err(kv_weights::Error::Invalid { .. }) => return Ok(None),
                    stack => stacks.push(stack?),
                }
                continue;
            }
            let bytes: Vec<&[u8]> = blocks.map(Blocks::bytes).collect();
            if most.is_some_and(|most| bytes.iter().map(|b| b.len() as u64).sum::<u64>() > most) {
                return Ok(None);
            }
            let shape = [rows, experts[0].shape[1]];
            match PackedExperts::from_bytes(&bytes, format, shape, &self.device) {
                // The padding between experts can exceed the buffer.
                Err(kv_weights::Error::Unsupported { .. }) => return Ok(None),
                stack => stacks.push(stack?),
            }
        }
        Ok(Some(stacks))
    }

    /// Returns the biases of all experts, `[experts, rows]`, if there are any.
    fn biases_of(&self, experts: &[ExpertRows]) -> Option<Tensor<2>> {
        let [rows, _] = experts.first()?.shape;
        let biases = experts.iter().map(|rows| rows.bias.clone()).collect::<Option<Vec<_>>>()?;
        let biases = TensorData::new(biases.concat(), [experts.len(), rows]);
        Some(Tensor::from_data(biases, (&self.device, DType::F32)))
    }

    /// Returns the projections of experts whose rows are in `parts`, each with its bias.
    fn linears_in(
        &mut self,
        experts: Vec<ExpertRows>,
        parts: &[PackedExperts],
    ) -> Result<Vec<Linear>> {
        let activations = self.packed.unwrap_or_default();
        for part in parts {
            self.kept.add(part.layout(), part.len());
        }
        let linear = |(number, rows): (usize, ExpertRows)| {
            let alone = parts.iter().map(|part| part.expert(number)).collect::<Result<_, _>>()?;
            let bias = self.bias_of(rows.bias);
            Ok(Linear { weight: Matrix::packed(alone, activations)?, bias })
        };
        experts.into_iter().enumerate().map(linear).collect()
    }

    /// Returns the projection of one expert, packed or as floats of the model's type.
    ///
    /// # Errors
    /// Fails if the device does not multiply packed weights.
    fn linear_of(&mut self, rows: ExpertRows) -> Result<Linear> {
        let ExpertRows { numbers, bias, shape } = rows;
        let weight = match numbers {
            Numbers::Packed(parts) => {
                let pack = |Part { format, rows, blocks }| {
                    self.pack_bytes(blocks.into_bytes(), format, [rows, shape[1]])
                };
                let parts = parts.into_iter().map(pack).collect::<Result<Vec<_>>>()?;
                Matrix::packed(parts.concat(), self.packed.unwrap_or_default())?
            }
            Numbers::Floats(values) => {
                let data = TensorData::new(values, shape).convert_dtype(self.dtype);
                self.param::<2>(data).into()
            }
        };
        Ok(Linear { weight, bias: self.bias_of(bias) })
    }

    fn bias_of(&mut self, bias: Option<Vec<f32>>) -> Option<Param<Tensor<1>>> {
        let bias = bias.map(|bias| {
            let len = bias.len();
            TensorData::new(bias, [len]).convert_dtype(self.dtype)
        });
        bias.map(|bias| self.param(bias))
    }

    /// Takes a vector.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn parameter(&mut self, name: &str, len: usize) -> Result<Param<Tensor<1>>> {
        self.vector(&[(name.into(), len)])
    }
}
