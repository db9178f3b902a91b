//! Models to bytes and back: the same state is the same bytes, in every process.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{Bool, Bytes as BurnBytes, Int, Tensor};
use bytes::Bytes;

use crate::Result;
use crate::checkpoint::Parts;
use crate::rng::key;

/// The file of a model's weights and buffers.
pub(crate) const MODEL: &str = "model.bpk";

/// The model with its weights drawn now, in the order of its fields, and with parameter ids that
/// are places in that order. burn draws a weight when it is first used, and an id at random, so that
/// neither would be the same in two processes.
pub(crate) fn initialise<M: Module>(model: M) -> M {
    let _ = paths(&model);
    model.map(&mut Renumber::default())
}

/// The paths of all trained parameters, in the order of the model's fields. Draws weights that are
/// not drawn yet.
pub(crate) fn paths<M: Module>(model: &M) -> Vec<String> {
    #[derive(Default)]
    struct Walk {
        path: Vec<String>,
        found: Vec<String>,
    }
    impl ModuleVisitor for Walk {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let _ = param.val();
            if param.is_require_grad() {
                self.found.push(self.path.join("."));
            }
        }
    }
    let mut walk = Walk::default();
    model.visit(&mut walk);
    walk.found
}

/// Gives parameters the ids 1, 2, ...; those that shared one still do.
#[derive(Default)]
struct Renumber(BTreeMap<ParamId, u64>);

impl Renumber {
    fn id(&mut self, old: ParamId) -> ParamId {
        let next = self.0.len() as u64 + 1;
        ParamId::from(*self.0.entry(old).or_insert(next))
    }
}

macro_rules! renumber {
    ($method:ident, $kind:ty) => {
        fn $method<const D: usize>(
            &mut self,
            param: Param<Tensor<D, $kind>>,
        ) -> Param<Tensor<D, $kind>> {
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(self.id(id), tensor, mapper)
        }
    };
}

impl ModuleMapper for Renumber {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(self.id(id), tensor, mapper)
    }
    renumber!(map_int, Int);
    renumber!(map_bool, Bool);
}

/// The model's state now, on the host.
pub(crate) fn snapshot<M: Module>(model: &M) -> ModuleRecord {
    // Brings BatchNorm's running statistics up to date, in place; a record is else one update behind.
    let _ = model.valid();
    model.clone().into_record()
}

/// The model with a checkpoint's weights, which must be of the same structure.
pub(crate) fn load_model<M: Module>(model: M, parts: &Parts) -> Result<M> {
    let bytes = parts.get(MODEL).ok_or("the checkpoint has no file model.bpk")?;
    let record = ModuleRecord::from_bytes(BurnBytes::from_bytes_vec(bytes.to_vec()))?;
    // Into the plain form first: BatchNorm's pending update would else be added to what is loaded.
    let _ = model.valid();
    Ok(model
        .try_load_record(record)
        .map_err(|error| format!("the checkpoint's weights do not fit this model: {error}"))?)
}

/// burn's bytes with the tensors sorted by name, which burn's optimizers leave in no order. Running
/// statistics keep the random ids that they were built with, which [`initialise`] cannot change and
/// nothing reads: a number made of the name takes their place.
pub(crate) fn canonical(bytes: BurnBytes) -> Result<Bytes> {
    let reader = burn_pack::Reader::from_bytes(bytes)?;
    let (metadata, scalars) = (reader.metadata().clone(), reader.scalars().clone());
    let mut tensors = vec![];
    for tensor in reader.into_tensors()? {
        tensors.push(tensor.into_parts()?);
    }
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let num_tensors = tensors.len() as u64;
    let tensors = tensors.into_iter().map(|(name, dtype, shape, id, bytes)| {
        let id = id.map(|id| if id > num_tensors { name_id(&name) } else { id });
        burn_pack::Tensor::new(name, dtype, shape, id, bytes)
    });
    let mut writer = burn_pack::Writer::new(tensors.collect());
    for (key, value) in &metadata {
        writer = writer.with_metadata(key, value);
    }
    for (key, value) in scalars {
        writer = writer.with_scalar(&key, value);
    }
    Ok(to_bytes(&writer.into_bytes()?))
}

/// An id above all places.
fn name_id(name: &str) -> u64 {
    let bytes: Vec<u64> = name.bytes().map(u64::from).collect();
    key(&bytes) | 1 << 63
}

/// burn's bytes as everyone's.
pub(crate) fn to_bytes(bytes: &BurnBytes) -> Bytes {
    Bytes::copy_from_slice(bytes)
}
