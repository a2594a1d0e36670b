//! Burn's [`Module`] behind a pointer.
//!
//! [`Module::visit`] and [`Module::map`] are generic over the visitor, and a visitor's methods are
//! generic over the rank of a parameter, so there is no `dyn Module`. Here a visitor is a function
//! of [`Met`], in which a parameter is a `dyn Any` with its rank. The module sees [`Forward`],
//! which calls that function. At the other end, [`visit`] and [`map`] turn the call back into one
//! of the caller's visitor.

use std::any::Any;

use burn::{
    module::{
        Devices, DisplaySettings, Flag, Module, ModuleDisplay, ModuleMapper, ModuleVisitor, Param,
    },
    tensor::{Bool, Device, Int, Tensor},
};

use crate::decoder::Decoder;

/// A [`Decoder`] that is also a [`Module`], as a trait object.
pub(crate) trait Erased: Any + Send + Sync {
    fn decoder(&self) -> &dyn Decoder;
    fn decoder_mut(&mut self) -> &mut dyn Decoder;
    fn boxed_clone(&self) -> Box<dyn Erased>;
    fn accept(&self, visitor: Visitor<'_>);
    fn changed(self: Box<Self>, change: Change<'_>) -> Box<dyn Erased>;
    fn validation(&self) -> Box<dyn Erased>;
    fn add_devices(&self, devices: Devices) -> Devices;
    fn display(&self, settings: DisplaySettings) -> String;
}

/// An operation that consumes a module and returns another one of the same type.
pub(crate) enum Change<'a> {
    Map(Mapper<'a>),
    ToDevice(&'a Device),
    Fork(&'a Device),
    Train,
    Materialize,
}

impl<M: Decoder + Module + ModuleDisplay> Erased for M {
    fn decoder(&self) -> &dyn Decoder {
        self
    }

    fn decoder_mut(&mut self) -> &mut dyn Decoder {
        self
    }

    fn boxed_clone(&self) -> Box<dyn Erased> {
        Box::new(self.clone())
    }

    fn accept(&self, visitor: Visitor<'_>) {
        self.visit(&mut Forward(visitor));
    }

    fn changed(self: Box<Self>, change: Change<'_>) -> Box<dyn Erased> {
        Box::new(match change {
            Change::Map(mapper) => self.map(&mut Forward(mapper)),
            Change::ToDevice(device) => self.to_device(device),
            Change::Fork(device) => self.fork(device),
            Change::Train => self.train(),
            Change::Materialize => self.materialize(),
        })
    }

    fn validation(&self) -> Box<dyn Erased> {
        Box::new(self.valid())
    }

    fn add_devices(&self, devices: Devices) -> Devices {
        self.collect_devices(devices)
    }

    fn display(&self, settings: DisplaySettings) -> String {
        self.format(settings)
    }
}

/// An argument of a visitor's method; a parameter is a `Param` of a tensor with its rank.
pub(crate) enum Met<'a> {
    Float(usize, &'a dyn Any),
    Int(usize, &'a dyn Any),
    Bool(usize, &'a dyn Any),
    Flag(&'a Param<Flag>),
    Enter(&'a str, &'a str),
    Exit(&'a str, &'a str),
}

pub(crate) type Visitor<'a> = &'a mut dyn FnMut(Met<'_>);

/// An argument of a mapper's method. For a parameter or a flag, the mapper returns another of the
/// same type.
pub(crate) enum Given<'a> {
    Float(usize, Box<dyn Any>),
    Int(usize, Box<dyn Any>),
    Bool(usize, Box<dyn Any>),
    Flag(Param<Flag>),
    Enter(&'a str, &'a str),
    Exit(&'a str, &'a str),
}

pub(crate) type Mapper<'a> = &'a mut dyn FnMut(Given<'_>) -> Box<dyn Any>;

/// Evaluates `$body` with the constant `$D` equal to `$rank`, which [`rank`] has checked.
macro_rules! with_rank {
    ($rank:expr, $D:ident => $body:expr) => {
        with_rank!($rank, $D => $body; 0 1 2 3 4 5 6 7 8)
    };
    ($rank:expr, $D:ident => $body:expr; $($n:literal)*) => {
        match $rank {
            $($n => { const $D: usize = $n; $body })*
            rank => unreachable!("rank {rank} does not compile"),
        }
    };
}

/// Returns `D`. A module with a parameter of a rank that `with_rank` lacks does not compile.
fn rank<const D: usize>() -> usize {
    const { assert!(D <= 8, "parameters have at most 8 dimensions") }
    D
}

fn borrowed<P: 'static>(param: &dyn Any) -> &P {
    param.downcast_ref().expect("rank and kind are passed with it")
}

fn owned<P: 'static>(param: Box<dyn Any>) -> P {
    *param.downcast().expect("rank and kind are passed with it")
}

/// Calls the method of `visitor` for `met`.
pub(crate) fn visit(visitor: &mut impl ModuleVisitor, met: Met<'_>) {
    match met {
        Met::Float(rank, param) => {
            with_rank!(rank, D => visitor.visit_float::<D>(borrowed(param)))
        }
        Met::Int(rank, param) => with_rank!(rank, D => visitor.visit_int::<D>(borrowed(param))),
        Met::Bool(rank, param) => with_rank!(rank, D => visitor.visit_bool::<D>(borrowed(param))),
        Met::Flag(flag) => visitor.visit_flag(flag),
        Met::Enter(name, container) => visitor.enter_module(name, container),
        Met::Exit(name, container) => visitor.exit_module(name, container),
    }
}

/// Calls the method of `mapper` for `given`.
pub(crate) fn map(mapper: &mut impl ModuleMapper, given: Given<'_>) -> Box<dyn Any> {
    match given {
        Given::Float(rank, param) => {
            with_rank!(rank, D => Box::new(mapper.map_float::<D>(owned(param))))
        }
        Given::Int(rank, param) => {
            with_rank!(rank, D => Box::new(mapper.map_int::<D>(owned(param))))
        }
        Given::Bool(rank, param) => {
            with_rank!(rank, D => Box::new(mapper.map_bool::<D>(owned(param))))
        }
        Given::Flag(flag) => Box::new(mapper.map_flag(flag)),
        Given::Enter(name, container) => {
            mapper.enter_module(name, container);
            Box::new(())
        }
        Given::Exit(name, container) => {
            mapper.exit_module(name, container);
            Box::new(())
        }
    }
}

/// The visitor or mapper that a module sees.
struct Forward<F>(F);

impl ModuleVisitor for Forward<Visitor<'_>> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        (self.0)(Met::Float(rank::<D>(), param));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        (self.0)(Met::Int(rank::<D>(), param));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        (self.0)(Met::Bool(rank::<D>(), param));
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        (self.0)(Met::Flag(flag));
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        (self.0)(Met::Enter(name, container));
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        (self.0)(Met::Exit(name, container));
    }
}

impl ModuleMapper for Forward<Mapper<'_>> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        owned((self.0)(Given::Float(rank::<D>(), Box::new(param))))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        owned((self.0)(Given::Int(rank::<D>(), Box::new(param))))
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        owned((self.0)(Given::Bool(rank::<D>(), Box::new(param))))
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        owned((self.0)(Given::Flag(flag)))
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        (self.0)(Given::Enter(name, container));
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        (self.0)(Given::Exit(name, container));
    }
}
