//! How values travel between a client and a server: [`Wire`].

use core::marker::PhantomData;

use burn::backend::{
    Backend, Remote,
    ir::BackendIr,
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::custom::TensorSpec;

use super::{
    arguments::Argument,
    malformed::Malformed,
    message::{Answer, Incoming, Outgoing, spec},
};

/// A value that an operation takes or returns.
///
/// Types that implement it stand for values, since tensors of all kinds have one type on a client.
pub trait Wire {
    /// The value on a backend.
    type Value<B: Backend>;

    /// Adds the value to a message.
    fn send(value: Self::Value<Remote>, message: &mut Outgoing);

    /// Reads the value from a message.
    ///
    /// # Errors
    /// A message without this value.
    fn receive<B: BackendIr>(message: &mut Incoming<'_, B>) -> Result<Self::Value<B>, Malformed>;
}

/// A value that consists of tensors alone, so that an operation can return it.
pub trait Output: Wire {
    /// Returns shapes and types of the tensors.
    fn specs<B: Backend>(value: &Self::Value<B>) -> Vec<TensorSpec>;

    /// Builds the value from the tensors of a client; `None` if there are too few.
    fn build(
        tensors: &mut impl Iterator<Item = FloatTensor<Remote>>,
    ) -> Option<Self::Value<Remote>>;

    /// Hands the tensors of a server to its client.
    ///
    /// # Errors
    /// A client that expects fewer tensors.
    fn publish<B: BackendIr>(
        value: Self::Value<B>,
        answer: &mut Answer<'_, B>,
    ) -> Result<(), Malformed>;
}

/// A float tensor.
#[derive(Clone, Copy, Debug)]
pub struct Float;

/// An int tensor.
#[derive(Clone, Copy, Debug)]
pub struct Int;

/// An argument that is not a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Arg<T>(PhantomData<T>);

/// An optional value.
#[derive(Clone, Copy, Debug)]
pub struct Maybe<W>(PhantomData<W>);

macro_rules! tensor {
    ($Kind:ident, $Tensor:ident, $receive:ident, $publish:ident) => {
        impl Wire for $Kind {
            type Value<B: Backend> = $Tensor<B>;

            fn send(value: $Tensor<Remote>, message: &mut Outgoing) {
                message.tensor(value);
            }

            fn receive<B: BackendIr>(
                message: &mut Incoming<'_, B>,
            ) -> Result<$Tensor<B>, Malformed> {
                message.$receive()
            }
        }

        impl Output for $Kind {
            fn specs<B: Backend>(value: &$Tensor<B>) -> Vec<TensorSpec> {
                vec![spec(value)]
            }

            fn build(
                tensors: &mut impl Iterator<Item = FloatTensor<Remote>>,
            ) -> Option<$Tensor<Remote>> {
                tensors.next()
            }

            fn publish<B: BackendIr>(
                value: $Tensor<B>,
                answer: &mut Answer<'_, B>,
            ) -> Result<(), Malformed> {
                answer.$publish(value)
            }
        }
    };
}

tensor!(Float, FloatTensor, float, float);
tensor!(Int, IntTensor, int, int);

impl<T: Argument> Wire for Arg<T> {
    type Value<B: Backend> = T;

    fn send(value: T, message: &mut Outgoing) {
        message.argument(&value);
    }

    fn receive<B: BackendIr>(message: &mut Incoming<'_, B>) -> Result<T, Malformed> {
        message.argument()
    }
}

impl<W: Wire> Wire for Maybe<W> {
    type Value<B: Backend> = Option<W::Value<B>>;

    fn send(value: Option<W::Value<Remote>>, message: &mut Outgoing) {
        message.argument(&value.is_some());
        if let Some(value) = value {
            W::send(value, message);
        }
    }

    fn receive<B: BackendIr>(
        message: &mut Incoming<'_, B>,
    ) -> Result<Option<W::Value<B>>, Malformed> {
        message.argument::<bool>()?.then(|| W::receive(message)).transpose()
    }
}

macro_rules! tuple {
    ($($W:ident $value:ident),+) => {
        impl<$($W: Wire),+> Wire for ($($W,)+) {
            type Value<B: Backend> = ($($W::Value<B>,)+);

            fn send(($($value,)+): Self::Value<Remote>, message: &mut Outgoing) {
                $($W::send($value, message);)+
            }

            fn receive<B: BackendIr>(
                message: &mut Incoming<'_, B>,
            ) -> Result<Self::Value<B>, Malformed> {
                Ok(($($W::receive(message)?,)+))
            }
        }

        impl<$($W: Output),+> Output for ($($W,)+) {
            fn specs<B: Backend>(($($value,)+): &Self::Value<B>) -> Vec<TensorSpec> {
                [$($W::specs::<B>($value)),+].concat()
            }

            fn build(
                tensors: &mut impl Iterator<Item = FloatTensor<Remote>>,
            ) -> Option<Self::Value<Remote>> {
                Some(($($W::build(tensors)?,)+))
            }

            fn publish<B: BackendIr>(
                ($($value,)+): Self::Value<B>,
                answer: &mut Answer<'_, B>,
            ) -> Result<(), Malformed> {
                $($W::publish($value, answer)?;)+
                Ok(())
            }
        }
    };
}

tuple!(A a, B1 b);
tuple!(A a, B1 b, C c);
tuple!(A a, B1 b, C c, D d, E e);

/// Implements [`Wire`](crate::remote::Wire) and [`Output`](crate::remote::Output) of a struct by
/// its fields.
///
/// ```ignore
/// wire_struct!(Cache = CacheState { keys: Int, values: Int, floats: Float });
/// ```
///
/// The first name is a new type that stands for the struct. After `inputs`, the struct can be taken
/// only, so that fields may be of types that no operation returns.
#[macro_export]
macro_rules! wire_struct {
    (inputs $Name:ident = $Struct:ident { $($field:ident: $wire:ty),+ $(,)? }) => {
        pub(crate) struct $Name;

        impl $crate::remote::Wire for $Name {
            type Value<B: $crate::remote::burn::backend::Backend> = $Struct<B>;

            fn send(
                value: $Struct<$crate::remote::burn::backend::Remote>,
                message: &mut $crate::remote::Outgoing,
            ) {
                $(<$wire as $crate::remote::Wire>::send(value.$field, message);)+
            }

            fn receive<B: $crate::remote::burn::backend::ir::BackendIr>(
                message: &mut $crate::remote::Incoming<'_, B>,
            ) -> Result<$Struct<B>, $crate::remote::Malformed> {
                Ok($Struct { $($field: <$wire as $crate::remote::Wire>::receive(message)?),+ })
            }
        }
    };
    ($Name:ident = $Struct:ident { $($field:ident: $wire:ty),+ $(,)? }) => {
        $crate::wire_struct!(inputs $Name = $Struct { $($field: $wire),+ });

        impl $crate::remote::Output for $Name {
            fn specs<B: $crate::remote::burn::backend::Backend>(
                value: &$Struct<B>,
            ) -> Vec<$crate::remote::TensorSpec> {
                [$(<$wire as $crate::remote::Output>::specs::<B>(&value.$field)),+].concat()
            }

            fn build(
                tensors: &mut impl Iterator<
                    Item = $crate::remote::burn::backend::tensor::FloatTensor<
                        $crate::remote::burn::backend::Remote,
                    >,
                >,
            ) -> Option<$Struct<$crate::remote::burn::backend::Remote>> {
                Some($Struct { $($field: <$wire as $crate::remote::Output>::build(tensors)?),+ })
            }

            fn publish<B: $crate::remote::burn::backend::ir::BackendIr>(
                value: $Struct<B>,
                answer: &mut $crate::remote::Answer<'_, B>,
            ) -> Result<(), $crate::remote::Malformed> {
                $(<$wire as $crate::remote::Output>::publish(value.$field, answer)?;)+
                Ok(())
            }
        }
    };
}
