//! Moves the weights of a module towards those of another, for target networks and averages.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::Result;

/// Returns `module` with each value moved towards that of `other`:
/// `module * (1 - share) + other * share`. A share of 1 copies the values.
///
/// Running statistics are moved too, while integers stay. The parameters keep their IDs and whether
/// they are frozen. Create the module with [`deep_copy`](crate::deep_copy): clones share running
/// statistics.
///
/// # Errors
///
/// Fails if the modules have different parameters, or if the share is not from 0 to 1.
pub fn blend<M: Module>(module: M, other: &M, share: f64) -> Result<M> {
    #[derive(Default)]
    struct Read {
        shapes: Vec<Vec<usize>>,
        values: Vec<Tensor<1>>,
    }
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().detach();
            let shape = values.dims().to_vec();
            self.values.push(values.reshape([shape.iter().product::<usize>()]));
            self.shapes.push(shape);
        }
    }
    struct Blend(std::vec::IntoIter<Tensor<1>>, f64);
    impl ModuleMapper for Blend {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let Some(other) = self.0.next() else { return param };
            let share = self.1;
            let (id, tensor, mapper) = param.consume();
            let is_trained = tensor.is_require_grad();
            let other = other.reshape(tensor.shape());
            // The product of 0 and an infinite value would be NaN.
            let blended = match share {
                0.0 => tensor,
                1.0 => other,
                _ => tensor * (1.0 - share) + other * share,
            };
            let blended = blended.detach().set_require_grad(is_trained);
            Param::from_mapped_value(id, blended, mapper)
        }
    }
    if !(0.0..=1.0).contains(&share) {
        return Err(format!("cannot blend with a share of {share}; it must be from 0 to 1").into());
    }
    let read = |module: &M| {
        // Apply BatchNorm's pending update, in place.
        let _ = module.valid();
        let mut read = Read::default();
        module.visit(&mut read);
        read
    };
    let other = read(other);
    if read(&module).shapes != other.shapes {
        return Err("cannot blend modules whose parameters have different shapes".into());
    }
    Ok(module.map(&mut Blend(other.values.into_iter(), share)))
}
