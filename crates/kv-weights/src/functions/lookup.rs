use burn::{
    backend::Dispatch,
    tensor::{Device, Int, Tensor},
};

use crate::{
    PackedMatrix, Result, WeightOps,
    backends::{check_bytes, check_device},
    error::invalid,
};

/// The rows of these numbers, restored. A number past the last row is the last row.
///
/// # Shapes
/// - `ids`: `[batch, seq]`
/// - output: `[batch, seq, columns]`, f32
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for a device without the operation.
pub fn lookup(ids: Tensor<2, Int>, matrix: &PackedMatrix) -> Result<Tensor<3>> {
    let ([batch, seq], [rows, columns]) = (ids.dims(), matrix.dims());
    check_device("lookup", &ids.device())?;
    check_device("lookup", &matrix.device())?;
    let last = i64::try_from(rows - 1).unwrap_or(i64::MAX);
    let ids = ids.clamp(0, last).reshape([batch * seq]).into_dispatch();
    let words = matrix.words().clone().into_dispatch();
    let rows = <Dispatch as WeightOps>::packed_rows(words, ids, matrix.layout());
    Ok(Tensor::<2>::from_dispatch(rows).reshape([batch, seq, columns]))
}

/// [`lookup`] in a matrix whose rows are those of all `parts`, one after the other. A part is read for the rows that
/// are in it, and its nearest row in place of those that are not.
///
/// # Shapes
/// - `ids`: `[batch, seq]`
/// - output: `[batch, seq, columns]`, f32
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for no parts or parts of different widths, otherwise those of [`lookup`].
pub fn lookup_parts(ids: Tensor<2, Int>, parts: &[&PackedMatrix]) -> Result<Tensor<3>> {
    let Some((first, others)) = parts.split_first() else {
        return Err(invalid("parts", 0, "must be one matrix or more"));
    };
    let (mut found, mut start) = (lookup(ids.clone(), first)?, first.dims()[0]);
    let shape = found.dims();
    for part in others {
        let [rows, columns] = part.dims();
        if columns != shape[2] {
            return Err(invalid(
                "columns",
                columns,
                format!("must be {}, those of the first part", shape[2]),
            ));
        }
        let from = i64::try_from(start).unwrap_or(i64::MAX);
        let here = ids.clone().greater_equal_elem(from).unsqueeze_dim::<3>(2).expand(shape);
        // Later parts replace the rows past this one.
        found = found.mask_where(here, lookup(ids.clone().clamp_min(from) - from, part)?);
        start += rows;
    }
    Ok(found)
}

impl PackedMatrix {
    /// All rows restored, `[rows, columns]`, f32.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a device without the operation.
    pub fn restore(&self) -> Result<Tensor<2>> {
        self.restore_rows(0, self.layout().rows())
    }

    /// `n` rows from `start` on restored, `[n, columns]`, f32.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for rows that are not there,
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a device without the operation, or for more numbers than
    /// it has in a buffer.
    pub fn restore_rows(&self, start: usize, n: usize) -> Result<Tensor<2>> {
        let rows = self.layout().rows();
        if start > rows || n > rows - start {
            let rule =
                format!("must be below {rows}, the rows of the matrix, and so all {n} from it on");
            return Err(invalid("start", start, rule));
        }
        let device: Device = self.device();
        check_device("restore_rows", &device)?;
        let (columns, format) = (self.layout().columns(), self.format());
        let what = || format!("restoring {n} rows of {columns} numbers of {format}");
        check_bytes(what, n * columns * size_of::<f32>(), &device)?;
        let words = self.words().clone().into_dispatch();
        let restored = <Dispatch as WeightOps>::packed_restore(words, self.layout(), start, n);
        Ok(Tensor::from_dispatch(restored))
    }
}
