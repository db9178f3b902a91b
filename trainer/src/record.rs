//! Serialization of models. Equal state gives equal bytes in every process.

use std::collections::BTreeMap;
use std::fmt::Debug;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{
    AllocationProperty, Bool, Bytes as BurnBytes, Element, Int, Tensor, TensorData,
};
use bytes::Bytes;
use stoker_kernels::row_major;

use crate::callback::Weights;
use crate::checkpoint::{CheckpointContents, FileParts};
use crate::{Error, Result};

mod blend;
mod buffers;
mod clones;
mod host;
mod pack;
mod weights_file;
mod weights_reader;

pub use blend::blend;
pub(crate) use buffers::{broadcast_buffers, buffers, with_buffers};
pub use clones::deep_copy;
pub(crate) use clones::{check_clones, parameter_ids, with_new_ids};
use host::HostTensor;
pub(crate) use host::to_bytes;
pub(crate) use pack::to_canonical;
use pack::{Entry, pack};
pub use weights_file::WeightsFile;

/// File of a model's weights and buffers.
pub(crate) const MODEL: &str = "model.bpk";

/// Initializes the model's weights now, in the order of its fields, and numbers its parameter IDs
/// in that order. Otherwise both would differ between processes: burn samples a weight on first
/// use, and IDs at random.
pub(crate) fn initialize<M: Module>(model: M) -> M {
    let _ = trained_paths(&model);
    model.map(&mut Renumber::default()).map(&mut RowMajor)
}

/// Stores weights on GPUs in [row-major order](row_major).
struct RowMajor;

impl ModuleMapper for RowMajor {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(row_major)
    }
}

/// Returns the paths of all trained parameters, in the order of the model's fields. Initializes
/// weights that are not initialized yet.
pub(crate) fn trained_paths<M: Module>(model: &M) -> Vec<String> {
    #[derive(Default)]
    struct Walk {
        path: Vec<String>,
        trained: Vec<String>,
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
                self.trained.push(self.path.join("."));
            }
        }
    }
    let mut walk = Walk::default();
    model.visit(&mut walk);
    walk.trained
}

/// Calls `read` with a tensor's values on the host, converted to `E` if necessary.
///
/// # Errors
///
/// Fails if the device or the conversion does. The values are then unknown; never use zeros
/// instead.
pub(crate) fn with_host_values<const D: usize, E: Element, T>(
    tensor: Tensor<D>,
    read: impl FnOnce(&[E]) -> T,
) -> Result<T> {
    let data = tensor.try_into_data().map_err(tensor_read_error)?;
    with_values(data, read)
}

fn with_values<E: Element, T>(data: TensorData, read: impl FnOnce(&[E]) -> T) -> Result<T> {
    let data = data.try_cast(E::dtype()).map_err(tensor_read_error)?;
    data.as_slice().map(read).map_err(tensor_read_error)
}

/// Builds the error for a tensor that cannot be read.
pub(crate) fn tensor_read_error(why: impl Debug) -> Error {
    format!("cannot read a tensor: {why:?}").into()
}

/// Copies all floating-point tensors of the model to the host, by path.
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
            match with_host_values(param.val(), <[f32]>::to_vec) {
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
    // Apply BatchNorm's pending update of the running statistics, in place.
    let _ = model.valid();
    model.visit(&mut walk);
    walk.failed.map_or(Ok(walk.weights), Err)
}

/// Gives parameters the IDs 1, 2, ...; parameters that share an ID still share one.
#[derive(Default)]
pub(crate) struct Renumber(BTreeMap<ParamId, u64>);

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

/// Takes a snapshot of the model. It shares tensors on the CPU, and copies others to the host.
pub(crate) fn snapshot<M: Module>(model: &M) -> Snapshot {
    // Apply BatchNorm's pending update, in place; otherwise the record is one update behind.
    let _ = model.valid();
    let mut snapshot = Snapshot::default();
    model.visit(&mut snapshot);
    snapshot
}

/// The tensors of a model at one point in time. A clone of the model would not suffice, since
/// clones share running statistics.
#[derive(Default)]
pub(crate) struct Snapshot {
    path: Vec<String>,
    tensors: Vec<Entry>,
    failed: Option<Error>,
}

impl Snapshot {
    /// Encodes in burn's format, sorted by name. The file shares the memory of tensors on the CPU.
    pub(crate) fn into_file(self) -> Result<FileParts> {
        match self.failed {
            Some(error) => Err(error),
            None => pack(self.tensors, &BTreeMap::new(), BTreeMap::new()),
        }
    }

    /// Same as [`into_file`](Self::into_file), copied into one buffer.
    pub(crate) fn into_bytes(self) -> Result<Bytes> {
        Ok(self.into_file()?.into_bytes())
    }

    fn add(&mut self, id: ParamId, values: Result<HostTensor>) {
        match values {
            Ok(HostTensor { bytes, shape, dtype }) => {
                let name = self.path.join(".");
                self.tensors.push(Entry { name, dtype, shape, id: Some(id.val()), bytes });
            }
            Err(error) => self.failed = Some(error),
        }
    }
}

impl ModuleVisitor for Snapshot {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param.id, HostTensor::from_float(param.transform_for_save().val()));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.id, HostTensor::from_int(param.transform_for_save().val()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.id, HostTensor::from_bool(param.transform_for_save().val()));
    }
}

/// Loads a checkpoint's weights into the model, which must have the same structure.
pub(crate) fn load_model<M: Module>(model: M, contents: &CheckpointContents) -> Result<M> {
    let bytes = contents.get(MODEL).ok_or("the checkpoint does not contain model.bpk")?;
    let record = ModuleRecord::from_bytes(to_burn_bytes(bytes))?;
    // Apply BatchNorm's pending update first; otherwise it would be added to the loaded statistics.
    let _ = model.valid();
    let model = model.try_load_record(record).map_err(|error| {
        format!("cannot load the checkpoint's weights into this model: {error}")
    })?;
    Ok(model.map(&mut RowMajor))
}

/// Returns `true` for IDs of buffers. The IDs of parameters are small, from [`initialize`].
pub(crate) fn is_buffer(id: ParamId) -> bool {
    id.val() > u64::from(u32::MAX)
}

/// Converts to burn's byte type. Copies only if the alignment is not sufficient for burn.
pub(crate) fn to_burn_bytes(bytes: &Bytes) -> BurnBytes {
    match bytes.as_ptr().addr().is_multiple_of(16) {
        true => BurnBytes::from_shared(bytes.clone(), AllocationProperty::Native),
        false => BurnBytes::from_bytes_vec(bytes.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;

    #[test]
    fn unreadable_values_are_an_error() {
        let bytes = Bytes::from(vec![1_u8; 24]);
        // Numbers cannot be read at an odd address.
        let start = usize::from(bytes.as_ptr().addr().is_multiple_of(2));
        let bytes = bytes.slice(start..start + 16);
        for (dtype, len) in [(DType::F32, 4), (DType::F64, 2)] {
            let bytes = BurnBytes::from_shared(bytes.clone(), AllocationProperty::Native);
            let data = TensorData::from_bytes(bytes, [len], dtype);
            let read = with_values(data, <[f64]>::to_vec).map_err(|error| error.to_string());
            assert!(read.clone().unwrap_err().starts_with("cannot read a tensor: "), "{read:?}");
        }
        let data = TensorData::from([1.5_f32, -2.0]);
        assert_eq!(with_values(data, <[f64]>::to_vec).unwrap(), [1.5, -2.0]);
    }
}
