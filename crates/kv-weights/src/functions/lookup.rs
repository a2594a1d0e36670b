use burn::{
    backend::Dispatch,
    tensor::{Device, Int, Tensor},
};

use crate::{
    PackedMatrix, Result, WeightOps,
    backends::{check_bytes, check_device},
    error::invalid,
};

/// Looks up rows by number and restores them. Numbers past the last row select the last row.
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

/// Looks up rows in a matrix split into `parts`, stacked in order.
///
/// For each id, one row of every part is read: the row itself, or the nearest one if the row is in
/// another part.
///
/// # Shapes
/// - `ids`: `[batch, seq]`
/// - output: `[batch, seq, columns]`, f32
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for no parts or for parts of different widths, and the
/// errors of [`lookup`].
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
                format!("must be {}, as in the first part", shape[2]),
            ));
        }
        let from = i64::try_from(start).unwrap_or(i64::MAX);
        let here = ids.clone().greater_equal_elem(from).unsqueeze_dim::<3>(2).expand(shape);
        // Later parts replace rows beyond this one.
        found = found.mask_where(here, lookup(ids.clone().clamp_min(from) - from, part)?);
        start += rows;
    }
    Ok(found)
}

impl PackedMatrix {
    /// Restores all rows, `[rows, columns]`, f32.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a device without the operation.
    pub fn restore(&self) -> Result<Tensor<2>> {
        self.restore_rows(0, self.layout().rows())
    }

    /// Restores `n` rows from `start` on, `[n, columns]`, f32.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for rows beyond the matrix.
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a device without the operation, or if
    /// the result exceeds its largest buffer.
    pub fn restore_rows(&self, start: usize, n: usize) -> Result<Tensor<2>> {
        let rows = self.layout().rows();
        if start > rows || n > rows - start {
            let rule = format!("must be followed by {n} rows, but the matrix has {rows}");
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
