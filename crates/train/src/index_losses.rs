//! The losses of indexers during training.

use burn::tensor::Tensor;
use kv_models::{
    AttentionObserver, AttentionTrace, Role,
    kv_cubecl::{self, sparse::SparseTrace},
};

use crate::{Prepared, Result, Trainable};

/// The losses of the indexers of one pass. They are added to the loss of the text, and change
/// nothing but the indexers.
pub(crate) struct IndexLosses {
    /// True if the model has an indexer that is trained.
    needed: bool,
    losses: Vec<kv_cubecl::Result<Option<Tensor<1>>>>,
}

impl IndexLosses {
    pub(crate) fn of(prepared: &Prepared, trainable: Trainable) -> Self {
        let mut layers = prepared.model.spec().layers.iter();
        let has_indexer = layers.any(|layer| layer.sparse.is_some_and(|it| it.selection.is_some()));
        let needed = has_indexer && trainable.includes(Some(Role::Indexer));
        Self { needed, losses: vec![] }
    }

    /// Runs a pass, and keeps the losses of its indexers.
    pub(crate) fn observe<R>(
        &mut self,
        pass: impl FnOnce(Option<&mut AttentionObserver<'_>>) -> R,
    ) -> R {
        let losses = &mut self.losses;
        let mut observe = |trace: AttentionTrace| {
            losses.extend(trace.sparse().map(SparseTrace::index_loss));
        };
        pass(if self.needed { Some(&mut observe) } else { None })
    }

    /// Returns the sum over tokens and layers, `[1]`.
    pub(crate) fn sum(self) -> Result<Option<Tensor<1>>> {
        let losses = self.losses.into_iter().filter_map(core::result::Result::transpose);
        let losses = losses.collect::<core::result::Result<Vec<_>, _>>();
        Ok(losses.map_err(kv_models::Error::from)?.into_iter().reduce(|sum, loss| sum + loss))
    }
}
