# Install rules and the package that find_package(Trireme) reads.
include(CMakePackageConfigHelpers)
set(TRIREME_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Trireme)

# The libraries were compiled with this copy of fmt's templates, so it travels with them.
set(fmt_source ${TRIREME_FMT_INCLUDE}/fmt)
if(TRIREME_TORCH_ROOT)
  set(fmt_source ${TRIREME_TORCH_ROOT}/include/fmt)
endif()
install(DIRECTORY ${fmt_source} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/trireme-fmt)
target_include_directories(trireme_fmt INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/trireme-fmt>)
set_target_properties(trireme_fmt PROPERTIES EXPORT_NAME fmt)

# Two export sets: whoever wants Trireme::plan alone must not be asked for torch.
install(TARGETS trireme_plan trireme_fmt EXPORT TriremePlanTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILE_SET generated DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT TriremePlanTargets NAMESPACE Trireme:: DESTINATION ${TRIREME_PACKAGE_DIR})
if(TRIREME_TORCH)
  install(TARGETS trireme EXPORT TriremeTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT TriremeTargets NAMESPACE Trireme:: DESTINATION ${TRIREME_PACKAGE_DIR})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/TriremeFindTorch.cmake ${PROJECT_SOURCE_DIR}/cmake/TriremeTorch.cmake
                ${PROJECT_SOURCE_DIR}/cmake/TriremeCudaArchs.cmake
          DESTINATION ${TRIREME_PACKAGE_DIR})
endif()

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/TriremeConfig.cmake.in
  ${PROJECT_BINARY_DIR}/TriremeConfig.cmake INSTALL_DESTINATION ${TRIREME_PACKAGE_DIR}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TriremeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TriremeConfig.cmake ${PROJECT_BINARY_DIR}/TriremeConfigVersion.cmake
        DESTINATION ${TRIREME_PACKAGE_DIR})
