//! [`RowStore`]: the tensors of a store of rows.

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

use super::{RowLayout, Rows, SparseOps, Stride};
use crate::{Error, Result, zeros::zeros};

/// A store of rows. The tensors are `None` only while a backend writes them.
#[derive(Clone, Debug)]
pub(super) struct RowStore {
    pub(super) layout: RowLayout,
    rows: Option<Rows<Dispatch>>,
}

/// Panic message for a store that is used after its backend panicked while writing it.
const LOST: &str = "the cache is lost: its backend panicked while writing";

impl RowStore {
    pub(super) fn zeros(layout: RowLayout, device: &Device) -> Self {
        let codes = zeros([layout.words()], device, DType::U32);
        let floats = zeros(layout.float_shape(), device, layout.format.float.dtype());
        Self::of(layout, codes, floats)
    }

    pub(super) fn of(layout: RowLayout, codes: Tensor<1, Int>, floats: Tensor<3>) -> Self {
        let rows = Rows { codes: codes.into_dispatch(), floats: floats.into_dispatch() };
        Self { layout, rows: Some(rows) }
    }

    /// Checks the shapes and types of tensors that were saved.
    ///
    /// # Errors
    /// [`Error::Shape`] naming a tensor that differs.
    pub(super) fn checked(
        layout: RowLayout,
        codes: Tensor<1, Int>,
        floats: Tensor<3>,
    ) -> Result<Self> {
        let wrong = |tensor, shape: Vec<usize>, found: DType, fits: Vec<usize>, dtype: DType| {
            let rule = format!("must be {fits:?} of {dtype:?}, not of {found:?}");
            Err(Error::Shape { op: "from_parts", tensor, shape, rule })
        };
        let (fits, dtype) = (layout.float_shape(), layout.format.float.dtype());
        if codes.dims() != [layout.words()] || codes.dtype() != DType::U32 {
            let (shape, found) = (codes.dims().to_vec(), codes.dtype());
            return wrong("codes", shape, found, vec![layout.words()], DType::U32);
        }
        if floats.dims() != fits || floats.dtype() != dtype {
            let (shape, found) = (floats.dims().to_vec(), floats.dtype());
            return wrong("floats", shape, found, fits.to_vec(), dtype);
        }
        Ok(Self::of(layout, codes, floats))
    }

    /// Returns handles to the tensors, for an operation that reads them.
    pub(super) fn read(&self) -> Rows<Dispatch> {
        self.rows.clone().expect(LOST)
    }

    pub(super) fn codes(&self) -> Tensor<1, Int> {
        Tensor::from_dispatch(self.read().codes)
    }

    pub(super) fn floats(&self) -> Tensor<3> {
        Tensor::from_dispatch(self.read().floats)
    }

    /// Returns the bytes of both tensors.
    pub(super) fn bytes(&self) -> usize {
        let (codes, floats) = (self.codes(), self.floats());
        4 * codes.shape().num_elements() + floats.shape().num_elements() * floats.dtype().size()
    }

    /// Calls [`SparseOps::put_rows`], in place.
    pub(super) fn put(&mut self, rows: Tensor<3>, span: &Tensor<2, Int>, stride: Stride) {
        let store = self.rows.take().expect(LOST);
        let (rows, span) = (rows.into_dispatch(), span.clone().into_dispatch());
        let layout = self.layout;
        self.rows = Some(<Dispatch as SparseOps>::put_rows(store, rows, span, layout, stride));
    }

    /// Returns a ring of `slots` slots with the `back` rows before the call, and the rows of the
    /// call. The store has no codes.
    pub(super) fn extended(
        &self,
        rows: Tensor<3>,
        span: &Tensor<2, Int>,
        back: usize,
        slots: usize,
    ) -> Self {
        let Rows { codes, floats } = self.read();
        let floats = <Dispatch as SparseOps>::tail_rows(
            floats,
            span.clone().into_dispatch(),
            self.layout,
            back,
            slots,
        );
        let layout = RowLayout { slots, ..self.layout };
        let mut ring = Self { layout, rows: Some(Rows { codes, floats }) };
        ring.put(rows, span, Stride::TOKENS);
        ring
    }

    /// Copies some sequences.
    pub(super) fn select(&self, sequences: &[usize]) -> Self {
        let floats = self.floats();
        let index: Vec<i32> = sequences.iter().map(|&sequence| sequence as i32).collect();
        let index = TensorData::new(index, [sequences.len()]);
        let index = Tensor::<1, Int>::from_data(index, (&floats.device(), DType::I32));
        let layout = RowLayout { batch: sequences.len(), ..self.layout };
        let codes = self.sequence_codes().map(|codes| codes.select(0, index.clone()));
        Self::of_sequences(layout, codes, floats.select(0, index))
    }

    /// Joins the sequences of several stores, which are otherwise alike.
    pub(super) fn join(stores: &[&Self]) -> Self {
        let batch = stores.iter().map(|store| store.layout.batch).sum();
        let layout = RowLayout { batch, ..stores[0].layout };
        let codes: Option<Vec<_>> = stores.iter().map(|store| store.sequence_codes()).collect();
        let floats = stores.iter().map(|store| store.floats()).collect();
        let codes = codes.map(|codes| Tensor::cat(codes, 0));
        Self::of_sequences(layout, codes, Tensor::cat(floats, 0))
    }

    /// Overwrites a sequence with the only one of another store.
    pub(super) fn put_sequence(&mut self, sequence: usize, one: &Self) {
        let n = self.layout.sequence_words();
        let [_, slots, width] = self.layout.float_shape();
        let Rows { codes, floats } = self.rows.take().expect(LOST);
        let mut codes: Tensor<1, Int> = Tensor::from_dispatch(codes);
        if n > 0 {
            let own = sequence * n..(sequence + 1) * n;
            codes = codes.slice_assign(own, one.codes().narrow(0, 0, n));
        }
        let floats: Tensor<3> = Tensor::from_dispatch(floats);
        let own = [sequence..sequence + 1, 0..slots, 0..width];
        *self = Self::of(self.layout, codes, floats.slice_assign(own, one.floats()));
    }

    /// Copies the first rows to a store of another number of slots, in which they have the same
    /// slots.
    pub(super) fn resized(&self, slots: usize) -> Self {
        let (from, to) = (self.layout, RowLayout { slots, ..self.layout });
        let codes = self.sequence_codes().map(|codes| {
            let device = codes.device();
            // Codes of all rows come first, then parameters that share words.
            let regions = |layout: &RowLayout| {
                let words = layout.sequence_words();
                let packed = layout.packed().filter(|packed| packed.spec.packs_parameters());
                let codes = packed.map_or(words, |packed| packed.parameters());
                [0..codes, codes..words]
            };
            let mut parts = vec![];
            for (old, new) in regions(&from).into_iter().zip(regions(&to)) {
                let kept = old.len().min(new.len());
                if kept > 0 {
                    parts.push(codes.clone().narrow(1, old.start, kept));
                }
                if new.len() > kept {
                    let shape = [to.batch, new.len() - kept];
                    parts.push(Tensor::zeros(shape, (&device, DType::U32)));
                }
            }
            Tensor::cat(parts, 1)
        });
        let floats = self.floats();
        let [batch, rows, width] = to.float_shape();
        let kept = rows.min(from.float_shape()[1]);
        let mut parts = vec![floats.clone().narrow(1, 0, kept)];
        if rows > kept {
            let options = (&floats.device(), floats.dtype());
            parts.push(Tensor::zeros([batch, rows - kept, width], options));
        }
        Self::of_sequences(to, codes, Tensor::cat(parts, 1))
    }

    /// Returns the code words of each sequence, if there are any.
    fn sequence_codes(&self) -> Option<Tensor<2, Int>> {
        let (batch, words) = (self.layout.batch, self.layout.sequence_words());
        (words > 0).then(|| self.codes().narrow(0, 0, batch * words).reshape([batch, words]))
    }

    fn of_sequences(layout: RowLayout, codes: Option<Tensor<2, Int>>, floats: Tensor<3>) -> Self {
        let codes = match codes {
            Some(codes) => codes.flatten(0, 1),
            None => Tensor::zeros([layout.words()], (&floats.device(), DType::U32)),
        };
        Self::of(layout, codes, floats)
    }
}
