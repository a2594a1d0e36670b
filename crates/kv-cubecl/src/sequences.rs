//! Checks of the sequences of a batch, for caches of every kind.

use crate::{Error, Result, error::invalid};

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

/// Checks that `added` tokens fit into each sequence.
///
/// # Errors
/// [`Error::CapacityExceeded`] for the only sequence of a batch, and [`Error::SequenceFull`] for
/// one of several.
pub(crate) fn check_room(lens: &[usize], added: &[usize], capacity: usize) -> Result<()> {
    for (sequence, (&len, &added)) in lens.iter().zip(added).enumerate() {
        if len + added > capacity {
            return Err(match lens.len() {
                1 => Error::CapacityExceeded { len, added, capacity },
                _ => Error::SequenceFull { sequence, len, added, capacity },
            });
        }
    }
    Ok(())
}
