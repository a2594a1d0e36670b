//! [`Gates`]: how many requests are prepared at a time.

use std::{sync::Arc, time::Instant};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout_at,
};

use super::error::ApiError;

/// Limits the number of requests that take memory for more than their texts at a time.
#[derive(Debug)]
pub struct Gates {
    preparing: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Gates {
    /// Allows `preparing` requests that are parsed, encoded and compiled at a time, and `large`
    /// bodies of more than 64 KiB in memory. The limits differ because a large body arrives as
    /// slowly as its client sends it, which delays only other large bodies.
    pub fn new(preparing: usize, large: usize) -> Self {
        let [preparing, large] = [preparing, large].map(|n| Arc::new(Semaphore::new(n)));
        Self { preparing, large }
    }

    /// Waits until a large body may be read.
    pub(super) async fn large(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, ApiError> {
        wait(&self.large, deadline).await
    }

    /// Waits until a request may be prepared, whose body has the place `large`.
    pub(super) async fn turn(
        &self,
        deadline: Instant,
        large: Option<OwnedSemaphorePermit>,
    ) -> Result<Turn, ApiError> {
        Ok(Turn { deadline, _preparing: wait(&self.preparing, deadline).await?, _large: large })
    }
}

impl Default for Gates {
    /// Allows 4 requests and 8 large bodies.
    fn default() -> Self {
        Self::new(4, 8)
    }
}

/// Waits for a place, until the deadline of the request.
async fn wait(gate: &Arc<Semaphore>, deadline: Instant) -> Result<OwnedSemaphorePermit, ApiError> {
    let place = timeout_at(deadline.into(), gate.clone().acquire_owned()).await;
    place.ok().and_then(Result::ok).ok_or_else(ApiError::late)
}

/// The places of a request while it is prepared. They are free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The time at which the texts of the request end.
    pub(crate) deadline: Instant,
    _preparing: OwnedSemaphorePermit,
    _large: Option<OwnedSemaphorePermit>,
}
