//! Buffers of a model: statistics that forward passes update, not an optimizer.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use bytes::Bytes;

use super::{is_buffer, with_host_values};
use crate::collective::Collective;
use crate::{Error, Result};

/// Returns the values of all buffers, as doubles in little-endian order. Empty for models without
/// buffers.
pub(crate) fn buffers<M: Module>(model: &M) -> Result<Bytes> {
    #[derive(Default)]
    struct Read {
        bytes: Vec<u8>,
        failed: Option<Error>,
    }
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if is_buffer(param.id) {
                let read = with_host_values(param.val(), |values: &[f64]| {
                    self.bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                });
                self.failed = self.failed.take().or(read.err());
            }
        }
    }
    // Apply BatchNorm's pending update, in place.
    let _ = model.valid();
    let mut read = Read::default();
    model.visit(&mut read);
    read.failed.map_or(Ok(read.bytes.into()), Err)
}

/// Returns the model with these buffers, as [`buffers`] returned them.
pub(crate) fn with_buffers<M: Module>(model: M, bytes: &Bytes) -> Result<M> {
    struct Write<'a>(&'a [u8]);
    impl ModuleMapper for Write<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !is_buffer(param.id) {
                return param;
            }
            let tensor = param.val();
            let (bytes, rest) = self.0.split_at(8 * tensor.shape().num_elements());
            self.0 = rest;
            let number = |bytes: &[u8]| bytes.try_into().map_or(f64::NAN, f64::from_le_bytes);
            let values: Vec<f64> = bytes.chunks_exact(8).map(number).collect();
            let data = TensorData::new(values, tensor.shape());
            let options = (&tensor.device(), tensor.dtype());
            Param::initialized(param.id, Tensor::from_data(data, options))
        }
    }
    if buffers(&model)?.len() != bytes.len() {
        return Err("the model has buffers of other sizes".into());
    }
    Ok(model.map(&mut Write(bytes)))
}

/// Replaces the model's buffers with those of rank 0. Free for models without buffers.
pub(crate) fn broadcast_buffers<M: Module>(model: M, ranks: &dyn Collective) -> Result<M> {
    let local = buffers(&model)?;
    if local.is_empty() {
        return Ok(model);
    }
    let num_bytes = local.len();
    let bytes = ranks.broadcast(local)?;
    if bytes.len() != num_bytes {
        return Err(
            "cannot share buffers: the model of rank 0 has buffers of other sizes; use the same \
             model on all ranks"
                .into(),
        );
    }
    if ranks.rank() == 0 { Ok(model) } else { with_buffers(model, &bytes) }
}
