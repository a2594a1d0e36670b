//! Checks of the sequences of a batch, for caches of every kind.

use crate::{Result, error::invalid};

/// Checks that a batch has this sequence; `field` is the name of the argument.
///
/// # Errors
/// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field.
pub(crate) fn check_sequence(field: &'static str, sequence: usize, batch: usize) -> Result<()> {
    match sequence < batch {
        true => Ok(()),
        false => Err(invalid(field, sequence, format!("must be below batch {batch}"))),
    }
}

/// Checks that the batch has this sequence and that it holds a token. `lens` has the number of
/// tokens of each.
///
/// # Errors
/// Fails as [`check_sequence`] does.
pub(crate) fn check_holds(sequence: usize, lens: &[usize]) -> Result<()> {
    check_sequence("sequence", sequence, lens.len())?;
    match lens[sequence] {
        0 => Err(invalid("sequence", sequence, "holds no token, its slot is free")),
        _ => Ok(()),
    }
}

/// Checks that the batch has this slot and that it is free.
///
/// # Errors
/// Fails as [`check_sequence`] does.
pub(crate) fn check_free(field: &'static str, sequence: usize, lens: &[usize]) -> Result<()> {
    check_sequence(field, sequence, lens.len())?;
    match lens[sequence] {
        0 => Ok(()),
        len => {
            let rule = format!("its slot is not free, it holds {len} tokens");
            Err(invalid(field, sequence, rule))
        }
    }
}
