//! Values of tensors on the host. Those of tensors on the CPU are shared, not copied.

use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Bool, Bytes as BurnBytes, DType, Int, Shape, Tensor, TensorData};
use bytes::Bytes;

use super::tensor_read_error;
use crate::Result;

/// Values of a tensor on the host, row by row.
pub(super) struct HostTensor {
    pub(super) bytes: Bytes,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
}

/// Defines a conversion from a tensor of this kind. `$plain` returns the tensor of the CPU backend,
/// given that of the same backend with gradients.
macro_rules! from_kind {
    ($name:ident, $kind:ty, $plain:expr) => {
        /// Reads the values. They share the tensor's memory on the CPU, unless it is a view.
        pub(super) fn $name<const D: usize>(tensor: Tensor<D, $kind>) -> Result<Self> {
            let plain = tensor.clone().try_into_primitive::<Flex>();
            let plain = plain
                .or_else(|_| tensor.clone().try_into_primitive::<Autodiff<Flex>>().map($plain));
            match plain.ok().and_then(Self::shared) {
                Some(shared) => Ok(shared),
                None => Ok(tensor.try_into_data().map_err(tensor_read_error)?.into()),
            }
        }
    };
}

impl HostTensor {
    from_kind!(from_float, burn::tensor::Float, |tensor| tensor.into_parts().0);
    from_kind!(from_int, Int, |tensor| tensor);
    from_kind!(from_bool, Bool, |tensor| tensor);

    /// Shares the values of a tensor that is not a view. The training loop changes a tensor in
    /// place only if it is not shared, so the values stay the same.
    fn shared(tensor: FlexTensor) -> Option<Self> {
        let (layout, dtype) = (tensor.layout(), tensor.dtype());
        let num_bytes = layout.num_elements() * dtype.size();
        let is_complete = layout.is_contiguous() && layout.start_offset() == 0;
        if !is_complete || tensor.bytes().len() != num_bytes {
            return None;
        }
        let shape = layout.shape().clone();
        Some(Self { bytes: Bytes::from_owner(SharedValues(tensor)), shape, dtype })
    }
}

impl From<TensorData> for HostTensor {
    fn from(data: TensorData) -> Self {
        let (bytes, shape, dtype) = data.into_parts();
        Self { bytes: to_bytes(bytes), shape, dtype }
    }
}

/// Keeps a tensor's memory alive.
struct SharedValues(FlexTensor);

impl AsRef<[u8]> for SharedValues {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// Converts from burn's byte type without copying.
pub(crate) fn to_bytes(bytes: BurnBytes) -> Bytes {
    /// burn's byte type.
    struct Shared(BurnBytes);
    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    Bytes::from_owner(Shared(bytes))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn host_values_are_those_of_the_tensor() {
        let devices = [Device::flex(), Device::flex().autodiff()];
        for device in devices {
            let tensor = Tensor::<2>::from_data([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &device);
            let check = |tensor: Tensor<2>, expected: [f32; 6]| {
                let host = HostTensor::from_float(tensor.clone()).unwrap();
                assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&host.bytes), expected);
                assert_eq!((host.shape, host.dtype), (tensor.shape(), DType::F32));
            };
            let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
            check(tensor.clone(), values);
            check(tensor.clone().transpose().reshape([2, 3]), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
            check(tensor.clone().transpose().swap_dims(0, 1).slice([0..2, 0..3]), values);
            let half = HostTensor::from_float(tensor.clone().slice([0..1, 0..3])).unwrap();
            assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&half.bytes), [1.0, 2.0, 3.0]);
            let turned = HostTensor::from_float(tensor.clone().transpose()).unwrap();
            let expected = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];
            assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&turned.bytes), expected);
            let read = || HostTensor::from_float(tensor.clone()).unwrap().bytes;
            assert_eq!(read().as_ptr(), read().as_ptr(), "the values were copied");
            let int = Tensor::<1, Int>::from_data([1, -2], &device);
            let expected = HostTensor::from(int.to_data());
            assert_eq!(HostTensor::from_int(int).unwrap().bytes, expected.bytes);
            let bool = Tensor::<1, Bool>::from_data([true, false], &device);
            let expected = HostTensor::from(bool.to_data());
            assert_eq!(HostTensor::from_bool(bool).unwrap().bytes, expected.bytes);
        }
    }

    /// A save shares tensors with the training loop.
    #[test]
    fn shared_values_survive_changes_in_place() {
        let tensor = Tensor::<1>::from_data([1.0, 2.0], &Device::flex());
        let before = HostTensor::from_float(tensor.clone()).unwrap();
        let expected = before.bytes.to_vec();
        let changed = tensor.add_scalar(1.0).mul_scalar(3.0);
        assert_eq!(changed.to_data(), TensorData::from([6.0_f32, 9.0]));
        assert_eq!(before.bytes, expected);
    }
}
