//! Operations of this workspace on the devices of burn-remote.
//!
//! A backend extension has two halves there: the client describes each operation as a message, and
//! the server runs it on a real backend. [`remote_ops`](crate::remote_ops) writes both from one
//! table, in which an operation is one entry. [`Wire`] says how a value travels: tensors by their
//! ids, all other arguments as MessagePack.

mod arguments;
mod call;
mod loopback;
mod malformed;
mod message;
mod server;
mod version;
mod wire;

pub use arguments::Argument;
#[doc(hidden)]
pub use burn;
pub use burn_fusion::custom::TensorSpec;
pub use call::{answer, call, with_op};
pub use loopback::Loopback;
pub use malformed::Malformed;
pub use message::{Answer, Incoming, Outgoing, Outputs, spec};
pub use server::{all_answer, answers, ask, lost, name, open};
pub use version::{serve_version, version};
pub use wire::{Arg, Float, Int, Maybe, Output, Wire};

/// Implements an extension trait for burn-remote, on both sides of the connection.
///
/// An entry is the signature of an operation in [`Wire`](crate::remote::Wire) types, and the shapes
/// and types of its outputs, an expression of the arguments by name that implements
/// [`Outputs`](crate::remote::Outputs):
///
/// ```ignore
/// remote_ops! {
///     "kv_cubecl", KvCacheOps, serve_cache;
///     fn quantize(input: Float, spec: Arg<QuantSpec>) -> Int {
///         shapes::quantize(&tensor(&input), &spec)
///     }
/// }
/// ```
///
/// This gives `impl KvCacheOps for Remote`, and the function `serve_cache::<B>(server)`, which
/// lets a server of backend `B` run the operations. The expression of the outputs runs on both
/// sides: the server refuses a message whose outputs are not the ones it computes itself.
#[macro_export]
macro_rules! remote_ops {
    (
        $prefix:literal, $Trait:ident, $serve:ident;
        $(fn $name:ident($($arg:ident: $wire:ty),+ $(,)?) -> $out:ty { $outputs:expr })+
    ) => {
        impl $Trait for $crate::remote::burn::backend::Remote {
            $(
                #[allow(
                    clippy::too_many_arguments,
                    clippy::type_complexity,
                    unused_variables,
                    reason = "the signature of the trait; outputs do not depend on all arguments"
                )]
                fn $name(
                    $($arg: <$wire as $crate::remote::Wire>::Value<Self>),+
                ) -> <$out as $crate::remote::Wire>::Value<Self> {
                    let outputs = $crate::remote::Outputs::into_specs($outputs);
                    let mut message = $crate::remote::Outgoing::new();
                    $(<$wire as $crate::remote::Wire>::send($arg, &mut message);)+
                    $crate::remote::call::<$out>(
                        message,
                        concat!($prefix, ".", stringify!($name)),
                        outputs,
                    )
                }
            )+
        }

        /// Lets `server`, whose devices belong to backend `B`, run the operations of the trait.
        #[allow(unused_variables, reason = "outputs do not depend on all arguments")]
        pub(crate) fn $serve<B>(
            server: $crate::remote::burn::server::RemoteServer,
        ) -> $crate::remote::burn::server::RemoteServer
        where
            B: $crate::remote::burn::backend::ir::BackendIr + $Trait,
        {
            $(
                let server = $crate::remote::with_op::<B>(
                    server,
                    concat!($prefix, ".", stringify!($name)),
                    |message| {
                        $(let $arg = <$wire as $crate::remote::Wire>::receive(message)?;)+
                        message.finish()?;
                        let outputs = $crate::remote::Outputs::into_specs($outputs);
                        message.check(&outputs)?;
                        let outputs = <B as $Trait>::$name($($arg),+);
                        $crate::remote::answer::<$out, B>(message, outputs)
                    },
                );
            )+
            server
        }
    };
}
