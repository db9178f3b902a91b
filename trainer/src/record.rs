//! Models to bytes and back: the same state is the same bytes, in every process.

use std::collections::BTreeMap;
use std::fmt::Debug;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{
    AllocationProperty, Bool, Bytes as BurnBytes, DType, Element, Int, Shape, Tensor, TensorData,
};
use bytes::Bytes;

use crate::callback::Weights;
use crate::checkpoint::Parts;
use crate::collective::Collective;
use crate::rng::key;
use crate::{Error, Result};

mod exchange;
mod stored;

pub use exchange::WeightsFile;

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

/// Calls `read` with a tensor's values, converted to `E` where they are of another type.
///
/// # Errors
///
/// The device or the conversion failed: the values are then unknown, and must not be taken for zeros.
pub(crate) fn on_host<const D: usize, E: Element, T>(
    tensor: Tensor<D>,
    read: impl FnOnce(&[E]) -> T,
) -> Result<T> {
    let data = tensor.try_into_data().map_err(unreadable)?;
    values_of(data, read)
}

fn values_of<E: Element, T>(data: TensorData, read: impl FnOnce(&[E]) -> T) -> Result<T> {
    let data = data.try_cast(E::dtype()).map_err(unreadable)?;
    data.as_slice().map(read).map_err(unreadable)
}

/// The error of a tensor that cannot be read.
pub(crate) fn unreadable(why: impl Debug) -> Error {
    format!("cannot read a tensor: {why:?}").into()
}

/// All floating-point numbers of the model on the host, by path.
pub(crate) fn weights<M: Module>(model: &M) -> Result<Weights> {
    #[derive(Default)]
    struct Walk {
        path: Vec<String>,
        weights: Weights,
        failed: Option<Error>,
    }
    impl ModuleVisitor for Walk {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match on_host(param.val(), <[f32]>::to_vec) {
                Ok(values) => {
                    if param.is_require_grad() {
                        self.weights.num_trained += values.len() as u64;
                    }
                    self.weights.tensors.push((self.path.join("."), values));
                }
                Err(error) => self.failed = Some(error),
            }
        }
    }
    let mut walk = Walk::default();
    // Brings BatchNorm's running statistics up to date, in place.
    let _ = model.valid();
    model.visit(&mut walk);
    walk.failed.map_or(Ok(walk.weights), Err)
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

/// The model as it is now. Its tensors are shared until a step makes new ones: nothing is copied
/// before [`Snapshot::into_bytes`].
pub(crate) fn snapshot<M: Module>(model: &M) -> Snapshot {
    // Brings BatchNorm's running statistics up to date, in place; a record is else one update behind.
    let _ = model.valid();
    let mut snapshot = Snapshot::default();
    model.visit(&mut snapshot);
    snapshot
}

/// The tensors of a model at one moment. A clone of the model would not do: clones share running
/// statistics.
#[derive(Default)]
pub(crate) struct Snapshot {
    path: Vec<String>,
    tensors: Vec<(String, ParamId, Read)>,
}

/// Takes a tensor to the host.
type Read = Box<dyn FnOnce() -> Result<TensorData> + Send>;

impl Snapshot {
    /// In burn's format, sorted by name.
    pub(crate) fn into_bytes(self) -> Result<Bytes> {
        let entry = |(name, id, read): (String, ParamId, Read)| {
            let (bytes, shape, dtype) = read()?.into_parts();
            Ok((name, dtype, shape, Some(id.val()), bytes))
        };
        let tensors: Result<_> = self.tensors.into_iter().map(entry).collect();
        pack(tensors?, &BTreeMap::new(), BTreeMap::new())
    }

    fn add(&mut self, id: ParamId, read: impl FnOnce() -> Result<TensorData> + Send + 'static) {
        self.tensors.push((self.path.join("."), id, Box::new(read)));
    }
}

/// A tensor's name, type, shape, id and bytes.
type Entry = (String, DType, Shape, Option<u64>, BurnBytes);

impl ModuleVisitor for Snapshot {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.transform_for_save().val();
        self.add(param.id, || tensor.try_into_data().map_err(unreadable));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.transform_for_save().val();
        self.add(param.id, || tensor.try_into_data().map_err(unreadable));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.transform_for_save().val();
        self.add(param.id, || tensor.try_into_data().map_err(unreadable));
    }
}

/// The model with a checkpoint's weights, which must be of the same structure.
pub(crate) fn load_model<M: Module>(model: M, parts: &Parts) -> Result<M> {
    let bytes = parts.get(MODEL).ok_or("the checkpoint has no file model.bpk")?;
    let record = ModuleRecord::from_bytes(to_burn(bytes))?;
    // Into the plain form first: BatchNorm's pending update would else be added to what is loaded.
    let _ = model.valid();
    Ok(model
        .try_load_record(record)
        .map_err(|error| format!("the checkpoint's weights do not fit this model: {error}"))?)
}

/// The model with rank 0's buffers: statistics that forward passes keep and no optimizer steps. A
/// model without any costs nothing.
pub(crate) fn share_buffers<M: Module>(model: M, ranks: &dyn Collective) -> Result<M> {
    #[derive(Default)]
    struct Read {
        values: Vec<f64>,
        failed: Option<Error>,
    }
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if is_buffer(param.id) {
                let read = on_host(param.val(), |values| self.values.extend_from_slice(values));
                self.failed = self.failed.take().or(read.err());
            }
        }
    }
    struct Write(std::vec::IntoIter<f64>);
    impl ModuleMapper for Write {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !is_buffer(param.id) {
                return param;
            }
            let tensor = param.val();
            let values: Vec<f64> = self.0.by_ref().take(tensor.shape().num_elements()).collect();
            let data = TensorData::new(values, tensor.shape());
            let options = (&tensor.device(), tensor.dtype());
            Param::initialized(param.id, Tensor::from_data(data, options))
        }
    }
    // Brings statistics up to date, in place.
    let _ = model.valid();
    let mut read = Read::default();
    model.visit(&mut read);
    if let Some(error) = read.failed {
        return Err(error);
    }
    if read.values.is_empty() {
        return Ok(model);
    }
    let bytes: Vec<u8> = read.values.iter().flat_map(|it| it.to_le_bytes()).collect();
    let num_bytes = bytes.len();
    let bytes = ranks.broadcast(bytes.into())?;
    if bytes.len() != num_bytes {
        return Err("rank 0 has a model of other statistics than this rank".into());
    }
    if ranks.rank() == 0 {
        return Ok(model);
    }
    let number = |it: &[u8]| it.try_into().map(f64::from_le_bytes).unwrap_or(f64::NAN);
    let values: Vec<f64> = bytes.chunks_exact(8).map(number).collect();
    Ok(model.map(&mut Write(values.into_iter())))
}

/// Whether an id is of none of the parameters, whose ids [`initialise`] makes places.
fn is_buffer(id: ParamId) -> bool {
    id.val() > u64::from(u32::MAX)
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
    pack(tensors, &metadata, scalars)
}

/// Burn's format, its tensors sorted by name.
fn pack(
    mut tensors: Vec<Entry>,
    metadata: &BTreeMap<String, String>,
    scalars: BTreeMap<String, burn_pack::Scalar>,
) -> Result<Bytes> {
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let num_tensors = tensors.len() as u64;
    let tensors = tensors.into_iter().map(|(name, dtype, shape, id, bytes)| {
        let id = id.map(|id| if id > num_tensors { name_id(&name) } else { id });
        burn_pack::Tensor::new(name, dtype, shape, id, bytes)
    });
    let mut writer = burn_pack::Writer::new(tensors.collect());
    for (key, value) in metadata {
        writer = writer.with_metadata(key, value);
    }
    for (key, value) in scalars {
        writer = writer.with_scalar(&key, value);
    }
    // Not `into_bytes`, which copies once more.
    let mut bytes = vec![0; writer.size()?];
    writer.write_into(&mut bytes)?;
    Ok(bytes.into())
}

/// Everyone's bytes as burn's. They are not copied where they are aligned as burn wants them.
pub(crate) fn to_burn(bytes: &Bytes) -> BurnBytes {
    match bytes.as_ptr().addr().is_multiple_of(16) {
        true => BurnBytes::from_shared(bytes.clone(), AllocationProperty::Native),
        false => BurnBytes::from_bytes_vec(bytes.to_vec()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_be_read_are_an_error() {
        let bytes = Bytes::from(vec![1_u8; 24]);
        // Numbers cannot be read at an odd address.
        let start = usize::from(bytes.as_ptr().addr().is_multiple_of(2));
        let bytes = bytes.slice(start..start + 16);
        for (dtype, len) in [(DType::F32, 4), (DType::F64, 2)] {
            let bytes = BurnBytes::from_shared(bytes.clone(), AllocationProperty::Native);
            let data = TensorData::from_bytes(bytes, [len], dtype);
            let read = values_of(data, <[f64]>::to_vec).map_err(|error| error.to_string());
            assert!(read.clone().unwrap_err().starts_with("cannot read a tensor: "), "{read:?}");
        }
        let data = TensorData::from([1.5_f32, -2.0]);
        assert_eq!(values_of(data, <[f64]>::to_vec).unwrap(), [1.5, -2.0]);
    }
}
