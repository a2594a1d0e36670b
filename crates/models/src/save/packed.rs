//! Saves quantized models: matrices as codes and scales, in a Hugging Face folder.

use std::{collections::BTreeMap, path::Path};

use burn::tensor::DType;
use kv_weights::{PackedLayout, Quantize, WeightFormat};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;

use super::{
    SaveOptions, configured,
    file::{TensorFile, TensorId},
    folder::{check_absent, new_folder},
    options::QuantizeOptions,
    rounded, write_folder,
};
use crate::{
    checkpoint::quantized::{
        BLOCKS, INTEGER_FORMAT, INTEGERS, MXFP4, PACKED, SCALE, SCALES, SHAPE, ZERO_POINT,
    },
    decoder::Roles,
    error::{Error, Result},
    exports::{Export, Exports, RowOrder, Values},
    model::LanguageModel,
    mxfp4::{self, BLOCK},
    nn::Matrix,
    tokenizer::Tokenizer,
};

/// Numbers that are restored and quantized at a time, in whole rows.
const AT_A_TIME: usize = 1 << 23;

/// Writes a model with quantized matrices as a new Hugging Face folder, which
/// [`load`](crate::load()) reads packed or restored.
///
/// Integers follow the format `pack-quantized` of the `compressed-tensors` library, which vLLM
/// reads; MXFP4 follows gpt-oss. Matrices are restored, quantized and written some rows at a time.
///
/// # Errors
/// Fails with one line that names the tensor or file. Reasons are rows that are not whole groups, a
/// format that cannot be written, weights that are not finite, experts in another format than
/// MXFP4, an existing folder, a file that cannot be written, the errors of [`save`](super::save),
/// and [`Error::Interrupted`]. Nothing is left on the disk then.
pub fn save_quantized(
    folder: impl AsRef<Path>,
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    options: QuantizeOptions<'_>,
) -> Result<()> {
    let folder = folder.as_ref();
    check_absent(folder)?;
    let weights = folder.join("model.safetensors");
    let floats = SaveOptions { dtype: options.dtype, cache: options.cache };
    let mut config = configured(model, tokenizer, floats, &folder.join("config.json"))?;
    let dtype = floats.dtype_of(model);
    let exports = model.decoder().export();
    let quantized = QuantizedExports::new(exports, &model.roles(), options, dtype, &weights)?;
    config.insert("quantization_config".into(), quantized.config());
    new_folder(folder, options.stop, |folder| {
        let write = |path: &Path| quantized.write(path, &weights);
        write_folder(folder, model, tokenizer, &config, options.cache, write)
    })
}

/// The tensors of a checkpoint, some of them to be quantized.
pub struct QuantizedExports<'a> {
    plan: Vec<Planned>,
    options: QuantizeOptions<'a>,
    dtype: DType,
}

impl<'a> QuantizedExports<'a> {
    /// Plans the format of each matrix by its role. Other tensors are written as `dtype`; messages
    /// name the file `path`.
    ///
    /// # Errors
    /// Fails for rows that are not whole groups, and for a format that cannot be written.
    pub fn new(
        exports: Exports,
        roles: &Roles,
        options: QuantizeOptions<'a>,
        dtype: DType,
        path: &Path,
    ) -> Result<Self> {
        let plan = plan(exports.into_tensors(), roles, options, path)?;
        Ok(Self { plan, options, dtype })
    }

    /// Returns `quantization_config` of `config.json`.
    pub fn config(&self) -> Value {
        quantization_config(&self.plan, self.options.quantize)
    }

    /// Writes the tensors to a temporary file beside `at`. The caller moves it to `at`.
    ///
    /// # Errors
    /// Fails for weights that are not finite, a file that cannot be written, and with
    /// [`Error::Interrupted`]; messages name the file `path`.
    pub fn write(&self, at: &Path, path: &Path) -> Result<NamedTempFile> {
        write_plan(at, &self.plan, self.dtype, self.options, path)
    }
}

impl core::fmt::Debug for QuantizedExports<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("QuantizedExports").field("options", &self.options).finish_non_exhaustive()
    }
}

/// A tensor of floats, or matrices that are quantized to one format.
enum Planned {
    Floats(String, Box<Values>),
    Quantized(QuantizedExport),
}

struct QuantizedExport {
    name: String,
    format: WeightFormat,
    /// `true` for the experts of a layer.
    experts: bool,
    /// Matrices, and the rows of each that are written.
    matrices: Vec<(Matrix, std::ops::Range<usize>)>,
    order: RowOrder,
    columns: usize,
}

fn plan(
    exports: Vec<Export>,
    roles: &Roles,
    options: QuantizeOptions<'_>,
    path: &Path,
) -> Result<Vec<Planned>> {
    let planned = exports.into_iter().map(|Export { name, values }| {
        let (matrix, experts) = match &values {
            Values::Rows(matrix, _) | Values::Transposed(matrix) => (matrix, false),
            Values::Experts(matrices, _) if !matrices.is_empty() => (&matrices[0], true),
            _ => return Ok(Planned::Floats(name, Box::new(values))),
        };
        let Some(format) = options.format(roles.get(matrix.id())) else {
            return Ok(Planned::Floats(name, Box::new(values)));
        };
        let wrong = |why| Error::Tensor { path: path.into(), tensor: name.clone(), why };
        let columns = matrix.dims()[1];
        let group = format.block_numbers();
        if !columns.is_multiple_of(group) {
            let fits = [64, 32].iter().find(|n| **n < group && columns.is_multiple_of(**n));
            let hint = fits.map_or(String::new(), |n| format!("; groups of {n} do"));
            let why = format!("has {columns} columns, which groups of {group} do not divide{hint}");
            return Err(wrong(why));
        }
        if experts && format != WeightFormat::Mxfp4 {
            let why = format!("has experts, which are written as mxfp4 or floats, not {format}");
            return Err(wrong(why));
        }
        let (matrices, order) = match values {
            Values::Rows(matrix, rows) => (vec![(matrix, rows)], RowOrder::Same),
            Values::Transposed(matrix) => {
                let rows = 0..matrix.dims()[0];
                (vec![(matrix, rows)], RowOrder::Same)
            }
            Values::Experts(matrices, order) => {
                let all = matrices.into_iter().map(|matrix| {
                    let rows = 0..matrix.dims()[0];
                    (matrix, rows)
                });
                (all.collect(), order)
            }
            _ => return Err(wrong("has no matrices".into())),
        };
        Ok(Planned::Quantized(QuantizedExport { name, format, experts, matrices, order, columns }))
    });
    planned.collect()
}

/// Returns `quantization_config` of `config.json`.
fn quantization_config(plan: &[Planned], quantize: Quantize) -> Value {
    let mut groups: BTreeMap<(usize, usize), Vec<&str>> = BTreeMap::new();
    let (mut floats, mut mxfp4) = (vec![], false);
    for planned in plan {
        match planned {
            Planned::Quantized(QuantizedExport { name, format, .. }) => match bits(*format) {
                Some(bits) => {
                    let module = name.trim_end_matches(".weight");
                    groups.entry((bits, format.block_numbers())).or_default().push(module);
                }
                None => mxfp4 = true,
            },
            Planned::Floats(name, values) => {
                if matches!(**values, Values::Rows(..) | Values::Floats(_)) {
                    floats.push(name.trim_end_matches(".weight"));
                }
            }
        }
    }
    if groups.is_empty() && mxfp4 {
        return json!({"quant_method": MXFP4, "modules_to_not_convert": floats});
    }
    let groups = groups.into_iter().enumerate().map(|(i, ((bits, size), targets))| {
        let weights = json!({
            "num_bits": bits, "type": "int", "symmetric": quantize.symmetric, "strategy": "group",
            "group_size": size, "dynamic": false,
        });
        (format!("group_{i}"), json!({"targets": targets, "weights": weights}))
    });
    json!({
        "quant_method": INTEGERS,
        "format": INTEGER_FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups.collect::<Map<_, _>>(),
        "ignore": floats,
    })
}

fn bits(format: WeightFormat) -> Option<usize> {
    match format {
        WeightFormat::Int4(_) => Some(4),
        WeightFormat::Int8(_) => Some(8),
        _ => None,
    }
}

/// Writes the planned tensors to the file `at`; messages call it `path`.
fn write_plan(
    at: &Path,
    plan: &[Planned],
    dtype: DType,
    options: QuantizeOptions<'_>,
    path: &Path,
) -> Result<NamedTempFile> {
    let mut file = TensorFile::new(at, path);
    let ids: Vec<Vec<TensorId>> = plan
        .iter()
        .map(|planned| match planned {
            Planned::Floats(name, values) => {
                let kind = match values.stored_as(dtype) {
                    DType::F16 => Dtype::F16,
                    DType::BF16 => Dtype::BF16,
                    DType::I64 => Dtype::I64,
                    _ => Dtype::F32,
                };
                vec![file.add(name.clone(), kind, values.shape())]
            }
            Planned::Quantized(export) => export.add_to(&mut file, options.quantize),
        })
        .collect();
    let mut file = file.begin()?;
    for (planned, ids) in plan.iter().zip(ids) {
        match planned {
            Planned::Floats(name, values) => {
                options.check_stop()?;
                let dtype = values.stored_as(dtype);
                file.write(ids[0], 0, &rounded(values, dtype, path, name)?)?;
            }
            Planned::Quantized(export) => export.write(&mut file, &ids, options, path)?,
        }
    }
    file.finish()
}

impl QuantizedExport {
    fn rows(&self) -> usize {
        self.matrices[0].1.len()
    }

    /// Adds the tensors that the matrices become.
    fn add_to(&self, file: &mut TensorFile<'_>, quantize: Quantize) -> Vec<TensorId> {
        let (rows, columns, name) = (self.rows(), self.columns, &self.name);
        let groups = columns / self.format.block_numbers();
        let named = |suffix: &str| format!("{name}{suffix}");
        let Some(bits) = bits(self.format) else {
            let n = if self.experts { vec![self.matrices.len()] } else { vec![] };
            let codes = [&n[..], &[rows, groups, BLOCK / 2]].concat();
            return vec![
                file.add(named(BLOCKS), Dtype::U8, codes),
                file.add(named(SCALES), Dtype::U8, [&n[..], &[rows, groups]].concat()),
            ];
        };
        let mut ids = vec![
            file.add(named(PACKED), Dtype::I32, vec![rows, columns * bits / 32]),
            file.add(named(SCALE), Dtype::F16, vec![rows, groups]),
            file.add(named(SHAPE), Dtype::I64, vec![2]),
        ];
        if !quantize.symmetric {
            let zeros = vec![(rows * bits).div_ceil(32), groups];
            ids.push(file.add(named(ZERO_POINT), Dtype::I32, zeros));
        }
        ids
    }

    fn write(
        &self,
        file: &mut TensorFile<'_>,
        ids: &[TensorId],
        options: QuantizeOptions<'_>,
        path: &Path,
    ) -> Result<()> {
        let wrong = |why| Error::Tensor { path: path.into(), tensor: self.name.clone(), why };
        // Zeros are packed along the rows, so each step has whole words of them.
        let at_a_time = (AT_A_TIME / self.columns).max(8) / 8 * 8;
        let mut parts = Parts::new(self.format, self.columns, ids);
        for (matrix, range) in &self.matrices {
            let starts = match self.order {
                RowOrder::Same => range.clone().step_by(at_a_time),
                // The order applies to all rows of an expert at once.
                RowOrder::InTurn => range.clone().step_by(range.len()),
            };
            for start in starts {
                options.check_stop()?;
                let n = match self.order {
                    RowOrder::Same => at_a_time.min(range.end - start),
                    RowOrder::InTurn => range.len(),
                };
                let rows = self.order.of(matrix.rows(start, n).detach());
                let data = rows.try_to_data().map_err(|error| wrong(error.to_string()))?;
                let values: Vec<f32> = data
                    .convert_dtype(DType::F32)
                    .try_into_vec()
                    .map_err(|e| wrong(e.to_string()))?;
                let blocks = in_threads(&values, self.columns, self.format, options.quantize)
                    .map_err(|error| wrong(error.to_string()))?;
                parts.write(file, &blocks, n)?;
            }
        }
        if let (Some(_), [_, _, shape, ..]) = (bits(self.format), ids) {
            let numbers = [self.rows() as i64, self.columns as i64].map(i64::to_le_bytes);
            file.write(*shape, 0, &numbers.concat())?;
        }
        Ok(())
    }
}

/// Quantizes rows on all processors.
fn in_threads(
    values: &[f32],
    columns: usize,
    format: WeightFormat,
    quantize: Quantize,
) -> Result<Vec<u8>> {
    let rows = values.len() / columns;
    #[cfg(feature = "flex")]
    let threads = rayon::current_num_threads();
    #[cfg(not(feature = "flex"))]
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.div_ceil(threads).max(1);
    let quantized: Vec<kv_weights::Result<Vec<u8>>> = std::thread::scope(|scope| {
        let started: Vec<_> = values
            .chunks(share * columns)
            .map(|part| {
                let shape = [part.len() / columns, columns];
                scope.spawn(move || kv_weights::quantize(part, shape, format, quantize))
            })
            .collect();
        started.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    let mut blocks = Vec::with_capacity(PackedLayout::new(format, [rows, columns])?.bytes());
    for part in quantized {
        blocks.extend(part?);
    }
    Ok(blocks)
}

/// Writes blocks as separate tensors.
struct Parts<'a> {
    format: WeightFormat,
    groups: usize,
    ids: &'a [TensorId],
    rows: usize,
}

impl<'a> Parts<'a> {
    fn new(format: WeightFormat, columns: usize, ids: &'a [TensorId]) -> Self {
        Self { format, groups: columns / format.block_numbers(), ids, rows: 0 }
    }

    fn write(&mut self, file: &mut TensorFile<'_>, blocks: &[u8], rows: usize) -> Result<()> {
        let first = self.rows * self.groups;
        let (mut codes, mut scales) = (vec![], vec![]);
        let blocks = blocks.chunks_exact(self.format.block_bytes());
        let Some(bits) = bits(self.format) else {
            for block in blocks {
                scales.push(block[0]);
                codes.extend(mxfp4::pairs(&block[1..]));
            }
            file.write(self.ids[0], first * BLOCK / 2, &codes)?;
            file.write(self.ids[1], first, &scales)?;
            self.rows += rows;
            return Ok(());
        };
        let words = (rows * bits).div_ceil(32);
        let mut zeros = vec![0u8; 4 * words * self.groups];
        for (i, block) in blocks.enumerate() {
            let (row, group) = (i / self.groups, i % self.groups);
            scales.extend_from_slice(&block[..2]);
            let byte = (row * bits / 32 * self.groups + group) * 4 + row * bits % 32 / 8;
            // The zero is a code in the low byte.
            zeros[byte] |= if bits == 8 { block[2] } else { block[2] << (4 * (row % 2)) };
            match bits {
                8 => codes.extend_from_slice(&block[4..]),
                _ => {
                    block[4..].chunks_exact(16).for_each(|block| codes.extend(mxfp4::pairs(block)))
                }
            }
        }
        let group_codes = (self.format.block_bytes() - 4) * first;
        file.write(self.ids[0], group_codes, &codes)?;
        file.write(self.ids[1], 2 * first, &scales)?;
        if let Some(id) = self.ids.get(3) {
            file.write(*id, self.rows * bits / 32 * self.groups * 4, &zeros)?;
        }
        self.rows += rows;
        Ok(())
    }
}
