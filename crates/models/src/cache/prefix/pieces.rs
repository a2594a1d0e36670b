//! Divides the tensors of a cache into the pieces of blocks and a tail, and joins them again.

use burn::tensor::TensorData;

use super::super::layer::{Growth, LayerPlan, Part};
use crate::error::{Error, Result};

/// The layers of a cache, and the places of pieces in their tensors.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    /// The different plans of all layers.
    plans: Vec<LayerPlan>,
    /// The index in `plans` of each layer.
    kinds: Vec<usize>,
}

/// Where the pieces of a cache of some length are.
#[derive(Clone, Debug)]
pub(super) struct Places {
    plans: Vec<LayerPlan>,
    /// The tensors of each of `plans`.
    parts: Vec<Vec<(Part, Growth)>>,
    kinds: Vec<usize>,
}

impl Layers {
    pub(super) fn new(layers: impl Iterator<Item = LayerPlan>) -> Self {
        let mut plans: Vec<LayerPlan> = vec![];
        let kind = |plan: LayerPlan| {
            let known = plans.iter().position(|known| *known == plan);
            known.unwrap_or_else(|| {
                plans.push(plan);
                plans.len() - 1
            })
        };
        let kinds = layers.map(kind).collect();
        Self { plans, kinds }
    }

    /// Returns the plans of all layers.
    pub(super) fn plans(&self) -> impl ExactSizeIterator<Item = &LayerPlan> {
        self.kinds.iter().map(|&kind| &self.plans[kind])
    }

    /// Returns the places in a cache of `len` tokens.
    ///
    /// # Errors
    /// Fails for a length that a layer cannot have.
    pub(super) fn places(&self, len: usize) -> Result<Places> {
        let plans: Vec<_> = self.plans.iter().map(|plan| plan.with_capacity(len)).collect();
        let parts = |plan: &LayerPlan| {
            let pairs = plan.parts()?.into_iter().zip(plan.growth()?);
            Ok(pairs.collect())
        };
        let parts = plans.iter().map(parts).collect::<Result<_>>()?;
        Ok(Places { plans, parts, kinds: self.kinds.clone() })
    }
}

impl Places {
    /// Returns the plan of each layer.
    pub(super) fn plans(&self) -> impl Iterator<Item = &LayerPlan> {
        self.kinds.iter().map(|&kind| &self.plans[kind])
    }

    /// Returns each tensor of all layers, with its layer and its number there.
    fn tensors(&self) -> impl Iterator<Item = ((usize, usize), &(Part, Growth))> {
        let layers = self.kinds.iter().enumerate();
        layers.flat_map(|(layer, &kind)| {
            self.parts[kind].iter().enumerate().map(move |(n, part)| ((layer, n), part))
        })
    }

    /// Returns the number of bytes of all blocks together.
    pub(super) fn block_bytes(&self) -> usize {
        self.bytes(|growth| growth.appended.iter().map(|region| region.len()).sum())
    }

    /// Returns the number of bytes of the tail.
    pub(super) fn tail_bytes(&self) -> usize {
        self.bytes(|growth| growth.lost.iter().map(|region| region.len()).sum())
    }

    fn bytes(&self, elements: impl Fn(&Growth) -> usize) -> usize {
        let bytes = |(part, growth): &(Part, Growth)| elements(growth) * part.dtype.size();
        let kinds: Vec<usize> =
            self.parts.iter().map(|parts| parts.iter().map(bytes).sum()).collect();
        self.kinds.iter().map(|&kind| kinds[kind]).sum()
    }

    /// Copies the piece of the block between `from` and `to` from the tensors of a cache of this
    /// length. `from` is `None` for the first block.
    pub(super) fn block(&self, data: &Data, from: Option<&Self>, to: &Self) -> Box<[u8]> {
        let mut piece = Vec::with_capacity(to.block_bytes() - from.map_or(0, Self::block_bytes));
        self.for_block(from, to, |tensor, bytes| {
            piece.extend_from_slice(&data.bytes(tensor)[bytes]);
        });
        piece.into()
    }

    /// Calls `f` with each stretch of bytes of the block between `from` and `to`.
    fn for_block(
        &self,
        from: Option<&Self>,
        to: &Self,
        mut f: impl FnMut((usize, usize), core::ops::Range<usize>),
    ) {
        let mut to = to.tensors();
        let mut from = from.map(Self::tensors);
        for (tensor, (part, growth)) in self.tensors() {
            let ends = to.next().map_or(&[][..], |(_, (_, growth))| &growth.appended);
            let starts = from.as_mut().and_then(Iterator::next);
            let starts = starts.map_or(&[][..], |(_, (_, growth))| &growth.appended);
            for (i, (region, end)) in growth.appended.iter().zip(ends).enumerate() {
                let start = region.start + starts.get(i).map_or(0, |region| region.len());
                let size = part.dtype.size();
                f(tensor, start * size..(region.start + end.len()) * size);
            }
        }
    }

    /// Copies the tail from the tensors of a cache of this length.
    pub(super) fn tail(&self, data: &Data) -> Box<[u8]> {
        let mut tail = Vec::with_capacity(self.tail_bytes());
        for (tensor, (part, growth)) in self.tensors() {
            let size = part.dtype.size();
            for region in &growth.lost {
                let bytes = region.start * size..region.end * size;
                tail.extend_from_slice(&data.bytes(tensor)[bytes]);
            }
        }
        tail.into()
    }

    /// Joins blocks and a tail to the tensors of a cache of this length. A block comes with the
    /// places at its end.
    pub(super) fn join<'a>(
        &self,
        blocks: impl Iterator<Item = Result<(&'a [u8], Places)>>,
        tail: &[u8],
    ) -> Result<Data> {
        let zeros = |parts: &Vec<(Part, Growth)>| {
            let zeros = parts.iter().map(|(part, _)| vec![0; part.elements() * part.dtype.size()]);
            zeros.collect::<Vec<Vec<u8>>>()
        };
        let mut data: Vec<_> = self.kinds.iter().map(|&kind| zeros(&self.parts[kind])).collect();
        let mut from: Option<Places> = None;
        for block in blocks {
            let (mut piece, to) = block?;
            self.for_block(from.as_ref(), &to, |(layer, n), bytes| {
                let (first, rest) = piece.split_at(bytes.len());
                data[layer][n][bytes].copy_from_slice(first);
                piece = rest;
            });
            from = Some(to);
        }
        let mut rest = tail;
        for ((layer, n), (part, growth)) in self.tensors() {
            let size = part.dtype.size();
            for region in &growth.lost {
                let (first, others) = rest.split_at(region.len() * size);
                data[layer][n][region.start * size..region.end * size].copy_from_slice(first);
                rest = others;
            }
        }
        let layers = data.into_iter().zip(&self.kinds).map(|(parts, &kind)| {
            let parts = parts.into_iter().zip(&self.parts[kind]);
            let tensor = |(bytes, (part, _)): (Vec<u8>, &(Part, Growth))| {
                TensorData::from_bytes_vec(bytes, part.shape.clone(), part.dtype)
            };
            parts.map(tensor).collect()
        });
        Ok(Data(layers.collect()))
    }

    /// Checks that tensors have the sizes that the pieces are cut from.
    ///
    /// # Errors
    /// Fails for a cache that was read in another type than its plan has.
    pub(super) fn check(&self, data: &Data) -> Result<()> {
        for (tensor, (part, _)) in self.tensors() {
            let (found, expected) = (data.bytes(tensor).len(), part.elements() * part.dtype.size());
            if found != expected {
                let value = format!("{found} bytes of {}", part.name);
                return Err(Error::argument("cache", value, format!("must be {expected}")));
            }
        }
        Ok(())
    }
}

/// The tensors of each layer of a cache.
#[derive(Clone, Debug)]
pub(super) struct Data(pub(super) Vec<Vec<TensorData>>);

impl Data {
    fn bytes(&self, (layer, n): (usize, usize)) -> &[u8] {
        self.0.get(layer).and_then(|parts| parts.get(n)).map_or(&[], |data| data.as_bytes())
    }
}
